"""A watched folder: files that are put into it are answered in batches. For sites without HTTP.

An input moves only after its answer is on disk, and what has an answer is not asked again, so a kill loses nothing.
Names of files stay on this disk: they are neither logged nor given to `answer`.
"""

import fcntl
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from mergestream.data.intake import IntakeError, Limits, Picture, read_upload
from mergestream.runtime.errors import InputError, MergestreamError, OutputError
from mergestream.runtime.files import make_folder
from mergestream.serving.watched_folder.dropbox import Dropbox, Incoming

LOGGER = logging.getLogger(__name__)
Answer = Callable[[list[Picture]], list[dict[str, Any]]]
Report = Callable[[Picture, dict[str, Any]], bytes]


@dataclass(frozen=True)
class Pace:
    """When a batch is full, how long its first file waits for others, and how often the folder is looked at."""

    batch_size: int = 32  # pictures
    batch_seconds: float = 5.0
    look_seconds: float = 1.0
    retry_seconds: float = 30.0  # after an answer that failed for no fault of the file's


def watch(
    folder: Path,
    answer: Answer,
    stop: Event,
    *,
    limits: Limits | None = None,
    pace: Pace | None = None,
    report: Report | None = None,
) -> None:
    """Answer what comes into `folder` until `stop` is set; files that were complete by then are still answered.

    `answer` gives one dict that JSON can hold for each picture; `report`, if given, a DICOM report to keep beside it.
    """
    with _held(make_folder(folder)):
        watcher = _Watcher(Dropbox(folder), answer, limits or Limits(), pace or Pace(), report)
        while not stop.is_set():
            watcher.look()
            stop.wait(watcher.pace.look_seconds)
        watcher.look(last=True)


class _Watcher:
    """What is known of the folder between two looks."""

    def __init__(self, box: Dropbox, answer: Answer, limits: Limits, pace: Pace, report: Report | None) -> None:
        self._box, self._answer, self._limits, self.pace, self._report = box, answer, limits, pace, report
        self._waiting_since: float | None = None
        self._not_before: dict[str, float] = {}

    def look(self, last: bool = False) -> None:
        """Answer the files that are complete, if they fill a batch or have waited long enough."""
        now = time.monotonic()
        self._not_before = {name: then for name, then in self._not_before.items() if then > now}
        ready = [name for name in self._box.complete_names() if name not in self._not_before]
        self._waiting_since = (self._waiting_since or now) if ready else None
        waited = self._waiting_since is not None and now - self._waiting_since >= self.pace.batch_seconds
        if last or waited or len(ready) >= self.pace.batch_size:
            self._waiting_since = None
            for batch in self._batches(ready):
                self._settle(batch)

    def _batches(self, names: Sequence[str]) -> Iterator[list[Incoming]]:
        """Files read one after the other; a batch ends when it is full, or as large as a request may be."""
        batch, pictures, size = list[Incoming](), 0, 0
        for name in names:
            incoming = self._read(name)
            if incoming is None:
                continue
            more = sum(picture.pixels.nbytes for picture in incoming.pictures)
            if batch and (
                pictures + len(incoming.pictures) > self.pace.batch_size or size + more > self._limits.decoded_bytes
            ):
                yield batch
                batch, pictures, size = [], 0, 0
            batch.append(incoming)
            pictures, size = pictures + len(incoming.pictures), size + more
        if batch:
            yield batch

    def _read(self, name: str) -> Incoming | None:
        """A file's pictures; None where it is gone, refused, or answered already."""
        try:
            data = self._box.content(name, self._limits.file_bytes)
            if data is None or self._box.settle_answered(name, data):
                return None
            return Incoming(name, read_upload(data, self._limits))
        except IntakeError as error:
            self._refuse(name, error.code, error.sentence)
        except (OSError, MergestreamError) as error:
            self._put_off([name], error)
        return None

    def _settle(self, batch: list[Incoming]) -> None:
        """Answer a batch; where that fails, each of its files alone, so that one bad file holds up no other."""
        pictures = [picture for incoming in batch for picture in incoming.pictures]
        try:
            answers = self._answer(pictures)
            if len(answers) != len(pictures):
                raise RuntimeError(f"{len(pictures)} pictures got {len(answers)} answers")
        except OutputError as error:  # a full disk is no file's fault
            self._put_off([incoming.name for incoming in batch], error)
        except Exception as error:
            if len(batch) > 1:
                for incoming in batch:
                    self._settle([incoming])
            elif isinstance(error, InputError):
                self._refuse(batch[0].name, "not_answered", "The model cannot take this picture.")
            else:
                self._put_off([batch[0].name], error)
        else:
            self._keep(batch, answers)

    def _keep(self, batch: list[Incoming], answers: list[dict[str, Any]]) -> None:
        start = 0
        for incoming in batch:
            own = answers[start : start + len(incoming.pictures)]
            start += len(incoming.pictures)
            try:
                self._box.keep_answer(incoming, own, self._reports(incoming, own))
            except OSError as error:
                self._put_off([incoming.name], error)

    def _reports(self, incoming: Incoming, answers: list[dict[str, Any]]) -> list[bytes]:
        """One for each picture that came from DICOM and has the identifiers that a report needs."""
        reports = []
        for picture, own in zip(incoming.pictures, answers, strict=True):
            if self._report is None or picture.source is None:
                continue
            try:
                reports.append(self._report(picture, own))
            except InputError:
                LOGGER.warning("A picture's answer has no report: its file lacks identifiers")
        return reports

    def _refuse(self, name: str, code: str, sentence: str) -> None:
        LOGGER.info("A file was refused: %s", code)
        try:
            self._box.refuse(name, code, sentence)
        except OSError as error:
            self._put_off([name], error)

    def _put_off(self, names: Sequence[str], error: Exception) -> None:
        LOGGER.warning("%d files stay to be answered later: %s", len(names), type(error).__name__)
        self._not_before |= dict.fromkeys(names, time.monotonic() + self.pace.retry_seconds)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Two watchers would answer every file twice."""
    with (folder / ".watching.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError(f"{folder} is watched by another mergestream. Stop it, or choose another one.") from None
        yield
