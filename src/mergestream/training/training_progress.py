"""Progress of a training run's fits, for one progress bar, the candidates' records and TensorBoard.

It goes through small files: workers of other processes and machines write them, the first process reads.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.files import read_json, write_json
from mergestream.runtime.parallel import Advance, Track
from mergestream.training.recipe import Recipe

SCHEMA_VERSION = 1
SECONDS_BETWEEN_WRITES = 0.5
Progress = dict[str, Any]


class ProgressFile:
    """Steps, seconds and losses of one fit, for the progress bar, the candidate's record and TensorBoard."""

    def __init__(self, path: Path, steps: int, tensorboard: Path | None = None) -> None:
        self._path, self._tensorboard = path, tensorboard
        self._writer: Any = None
        zero: Progress = {"schema_version": SCHEMA_VERSION, "step": 0, "steps": steps, "seconds": 0.0, "curve": []}
        self.progress = zero
        self._start, self._written = time.monotonic(), -SECONDS_BETWEEN_WRITES

    def add_step(self) -> None:
        self.progress["step"] += 1
        if time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES:
            self._write()

    def add_validation(self, line: dict[str, float]) -> None:
        """Add a validation; a resumed fit reports its earlier ones again."""
        self.progress["curve"].append(line)
        self.progress["step"] = int(line["step"])
        if self._tensorboard is not None:
            self._writer = self._writer or _open_tensorboard(self._tensorboard)
            for key in line.keys() - {"step"}:
                split, _, kind = key.partition("_")
                self._writer.add_scalar(f"{kind}/{split}", line[key], int(line["step"]))

    def close(self) -> None:
        if self.progress["curve"]:  # otherwise the expert was cached, and the earlier file stays valid
            self._write()
        if self._writer is not None:
            self._writer.close()

    def _write(self) -> None:
        self.progress["seconds"] = round(time.monotonic() - self._start, 3)
        write_json(self._path, self.progress)
        self._written = time.monotonic()


def read_progress(path: Path) -> Progress | None:
    """Return a fit's progress, or None if it has written none yet."""
    try:
        return read_json(path, SCHEMA_VERSION)
    except CheckpointError:
        return None


@contextmanager
def follow_progress(title: str, paths: Sequence[Path], recipes: Sequence[Recipe], track: Track) -> Iterator[None]:
    """Show all fits as one progress bar during a block: steps, images per second, and the latest losses."""
    done = threading.Event()
    with track(title, sum(recipe.steps for recipe in recipes)) as advance:
        sizes = [recipe.batch_size for recipe in recipes]
        watcher = threading.Thread(target=_watch, args=(paths, sizes, advance, done), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def _watch(paths: Sequence[Path], sizes: Sequence[int], advance: Advance, done: threading.Event) -> None:
    """`sizes`: images per step of each fit."""
    shown, last = [0] * len(paths), False
    images, began = 0, time.monotonic()
    while not last:
        last = done.wait(SECONDS_BETWEEN_WRITES)
        for number, path in enumerate(paths):
            progress = read_progress(path)
            if progress is not None and progress["step"] > shown[number]:
                latest = f"step {progress['step']}"
                for line in progress["curve"][-1:]:
                    latest = f"loss {line['training_loss']:.3f}, validation {line['validation_loss']:.3f}"
                steps = progress["step"] - shown[number]
                images += steps * sizes[number]
                speed = images / max(time.monotonic() - began, SECONDS_BETWEEN_WRITES)
                advance(steps, f"{speed:,.0f} images/s, {path.stem}: {latest}")
                shown[number] = progress["step"]


def require_tensorboard() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("TensorBoard files need TensorBoard: pip install 'mergestream[tensorboard]'.") from error
    return SummaryWriter


def _open_tensorboard(folder: Path) -> Any:
    """Open a writer that replaces an earlier fit's files."""
    for earlier in folder.glob("events.out.tfevents.*") if folder.exists() else ():
        earlier.unlink()
    return require_tensorboard()(str(folder))
