"""A run that is not finished yet, on disk: its answers and its method's state, so that a killed run goes on."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergestream.methods import Method
from mergestream.runtime.errors import MergestreamError
from mergestream.runtime.state_file import read_state, write_state

EVERY = 20.0  # seconds between two writings
Steps = list[dict[str, Any]]


class PartialRun:
    """One file: probabilities so far, the step records, and the method's state."""

    def __init__(self, path: Path, every: float = EVERY) -> None:
        """`every` so many seconds, or after every step (0)."""
        self._path, self._every, self._written = path, every, time.monotonic()

    def restore(self, method: Method) -> tuple[Steps, list[Tensor]]:
        """Steps and probabilities written before, and the method as it was then; nothing, if there is nothing sound."""
        try:
            stored = read_state(self._path)
            method.load_state_dict({**method.provenance, "state": stored["state"]})
            steps = stored["steps"]
            return steps, list(stored["probabilities"].split([step["images"] for step in steps]))
        except (KeyError, TypeError, RuntimeError, MergestreamError):
            method.reset()
            return [], []

    def keep(self, method: Method, steps: Steps, probabilities: list[Tensor]) -> None:
        """Write what there is, unless it was written just before."""
        started = time.monotonic()
        if started - self._written < self._every:
            return
        state = method.state_dict()["state"]
        write_state(self._path, {"probabilities": torch.cat(probabilities), "steps": steps, "state": state})
        self._written = time.monotonic()
        if self._every:  # a method may carry gigabytes: writing it down takes at most a tenth of the time
            self._every = max(self._every, 10 * (self._written - started))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
