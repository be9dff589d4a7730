"""Nested state (maps, lists, tensors, numbers, text) in one safetensors file, never a pickle."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from mergestream.runtime.errors import CheckpointError
from mergestream.runtime.files import write_atomically


def write_state(path: Path, state: Any) -> None:
    """Write maps, lists, tensors and JSON values atomically."""
    tensors, about = _packed_file(state)
    write_atomically(path, lambda temporary: save_file(tensors, temporary, about))


def state_as_bytes(state: Any) -> bytes:
    """The content of the file that `write_state` writes."""
    return save(*_packed_file(state))


def read_state(path: Path) -> Any:
    """Read a file written by `write_state`."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return _unpacked(json.loads(file.metadata()["state"]), tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable state file: {error}.") from error


class SavedState:
    """A state file for work that may be killed, written at most every `seconds`: so much work a kill may cost.

    A state may be gigabytes: if writing takes more than `share` of the time, it is written less often.
    """

    def __init__(self, path: Path, seconds: float = 0.0, *, share: float = 1.0) -> None:
        self.path, self._seconds, self._share, self._written = path, seconds, share, time.monotonic()

    def load(self) -> Any:
        """Return the saved state, or None if there is none or it is damaged."""
        self._written = time.monotonic()
        try:
            return read_state(self.path)
        except CheckpointError:
            return None

    def save_if_due(self, state: Callable[[], Any]) -> None:
        started = time.monotonic()
        if started - self._written >= self._seconds:
            write_state(self.path, state())
            self._written = time.monotonic()
            if self._seconds:
                self._seconds = max(self._seconds, (self._written - started) / self._share)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _packed_file(state: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors: dict[str, Tensor] = {}
    return tensors, {"state": json.dumps(_packed(state, "state", tensors))}


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
