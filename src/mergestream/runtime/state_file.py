"""Nested state (maps, lists, tensors, numbers, text) in one safetensors file, never a pickle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mergestream.runtime.errors import CheckpointError
from mergestream.runtime.files import write_atomically


def write_state(path: Path, state: Any) -> None:
    """Write maps, lists, tensors and JSON values atomically."""
    tensors: dict[str, Tensor] = {}
    shape = json.dumps(_packed(state, "state", tensors))
    write_atomically(path, lambda temporary: save_file(tensors, temporary, {"state": shape}))


def read_state(path: Path) -> Any:
    """Read a file written by `write_state`."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return _unpacked(json.loads(file.metadata()["state"]), tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable state file: {error}.") from error


def _packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a state to JSON; tensors go to `tensors` under the path that leads to them."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):  # as pairs, since keys may be numbers
        return {"map": [[key, _packed(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [_packed(item, f"{name}/{number}", tensors) for number, item in enumerate(value)]}
    return {"value": value}


def _unpacked(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "map" in value:
        return {key: _unpacked(item, tensors) for key, item in value["map"]}
    if "list" in value:
        return [_unpacked(item, tensors) for item in value["list"]]
    return value["value"]
