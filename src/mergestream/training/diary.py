"""What a fit tells while it runs: a small file that others read, and TensorBoard's if asked for."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.files import read_json, write_json
from mergestream.runtime.parallel import Advance, Track

SCHEMA_VERSION = 1
SECONDS_BETWEEN_WRITES = 0.5
Entry = dict[str, Any]


class Diary:
    """One fit's progress. A file, not a queue: workers of other processes and other nodes write it, the first reads."""

    def __init__(self, path: Path, steps: int, tensorboard: Path | None = None) -> None:
        self._path, self._tensorboard = path, tensorboard
        self.entry: Entry = {"schema_version": SCHEMA_VERSION, "step": 0, "steps": steps, "seconds": 0.0, "curve": []}
        self._began, self._written = time.monotonic(), -SECONDS_BETWEEN_WRITES
        self._writer: Any = None

    def stepped(self) -> None:
        self.entry["step"] += 1
        if time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES:
            self.write()

    def looked(self, line: dict[str, float]) -> None:
        """A look at the validation split; a fit that goes on tells its earlier looks again."""
        self.entry["curve"].append(line)
        self.entry["step"] = int(line["step"])
        if self._tensorboard is not None:
            writer = self._writer = self._writer or open_tensorboard(self._tensorboard)
            for key, value in line.items():
                if key != "step":
                    what, _, kind = key.partition("_")
                    writer.add_scalar(f"{kind}/{what}", value, int(line["step"]))

    def write(self) -> None:
        self.entry["seconds"] = round(time.monotonic() - self._began, 3)
        write_json(self._path, self.entry)
        self._written = time.monotonic()

    def close(self) -> None:
        if self.entry["curve"]:  # else nothing was to be done, and what an earlier diary says stays true
            self.write()
        if self._writer is not None:
            self._writer.close()


def read_diary(path: Path) -> Entry | None:
    """What a fit has told, if it has."""
    try:
        return read_json(path, SCHEMA_VERSION)
    except CheckpointError:
        return None


@contextmanager
def followed(title: str, paths: Sequence[Path], steps: Sequence[int], track: Track) -> Iterator[None]:
    """A block during which all fits show as one: their steps together, and the losses of the last to tell."""
    ended = threading.Event()
    with track(title, sum(steps)) as advance:
        watcher = threading.Thread(target=_watch, args=(paths, advance, ended), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def _watch(paths: Sequence[Path], advance: Advance, ended: threading.Event) -> None:
    known = [0] * len(paths)
    last = False
    while not last:
        last = ended.wait(SECONDS_BETWEEN_WRITES)
        for number, path in enumerate(paths):
            entry = read_diary(path)
            if entry is not None and entry["step"] > known[number]:
                advance(entry["step"] - known[number], _in_words(path.stem, entry))
                known[number] = entry["step"]


def _in_words(name: str, entry: Entry) -> str:
    if not entry["curve"]:
        return f"{name}: step {entry['step']}"
    line = entry["curve"][-1]
    return f"{name}: loss {line['training_loss']:.3f}, validation {line['validation_loss']:.3f}"


def open_tensorboard(folder: Path) -> Any:
    """A writer into `folder`, in place of what an earlier try left there."""
    writer = require_tensorboard()
    for left in folder.glob("events.out.tfevents.*") if folder.exists() else ():
        left.unlink()
    return writer(str(folder))


def require_tensorboard() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("TensorBoard files need TensorBoard: pip install 'mergestream[tensorboard]'.") from error
    return SummaryWriter
