"""A run that is not finished yet, on disk: its answers and its method's state, so that a killed run goes on."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mergestream.errors import MergestreamError
from mergestream.files import write_atomically
from mergestream.methods import Method

EVERY = 20.0  # seconds between two writings
Steps = list[dict[str, Any]]


class PartialRun:
    """One safetensors file: probabilities so far, the step records, and the method's state. Never a pickle."""

    def __init__(self, path: Path, every: float = EVERY) -> None:
        """`every` so many seconds, or after every step (0)."""
        self._path, self._every, self._written = path, every, time.monotonic()

    def restore(self, method: Method) -> tuple[Steps, list[Tensor]]:
        """Steps and probabilities written before, and the method as it was then; nothing, if there is nothing sound."""
        try:
            with safe_open(self._path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                record = json.loads(file.metadata()["record"])
            method.load_state_dict({**method.identity, "state": _unpacked(record["state"], tensors)})
            steps = record["steps"]
            return steps, list(tensors["probabilities"].split([step["images"] for step in steps]))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError, MergestreamError):
            method.reset()
            return [], []

    def keep(self, method: Method, steps: Steps, probabilities: list[Tensor]) -> None:
        """Write what there is, unless it was written just before."""
        started = time.monotonic()
        if started - self._written < self._every:
            return
        tensors = {"probabilities": torch.cat(probabilities).contiguous()}
        state = _packed(method.state_dict()["state"], "state", tensors)
        metadata = {"record": json.dumps({"steps": steps, "state": state})}
        write_atomically(self._path, lambda path: save_file(tensors, path, metadata))
        self._written = time.monotonic()
        if self._every:  # a method may carry gigabytes: writing it down takes at most a tenth of the time
            self._every = max(self._every, 10 * (self._written - started))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A state as JSON; tensors go to `tensors` under the path that leads to them."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"map": {key: _packed(item, f"{name}/{key}", tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return {"list": [_packed(item, f"{name}/{number}", tensors) for number, item in enumerate(value)]}
    return {"value": value}


def _unpacked(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "map" in value:
        return {key: _unpacked(item, tensors) for key, item in value["map"].items()}
    if "list" in value:
        return [_unpacked(item, tensors) for item in value["list"]]
    return value["value"]
