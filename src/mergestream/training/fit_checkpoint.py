"""The state of an unfinished fit on disk: a killed fit continues from it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mergestream.runtime.errors import CheckpointError
from mergestream.runtime.state_file import read_state, write_state


class FitCheckpoint:
    """A file for the state of a fit, written at most every `seconds`: so much work a kill may cost."""

    def __init__(self, path: Path, seconds: float = 0.0) -> None:
        self.path, self.seconds = path, seconds
        self._written = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Return the saved state, or None if there is none or it is damaged."""
        self._written = time.monotonic()
        if not self.path.exists():
            return None
        try:
            return read_state(self.path)
        except CheckpointError:
            return None

    def save_if_due(self, state: Callable[[], dict[str, Any]]) -> None:
        if time.monotonic() - self._written >= self.seconds:
            write_state(self.path, state())
            self._written = time.monotonic()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
