"""A watched folder, for sites without HTTP: complete files are answered in batches through the service.

A file is moved only after its answer is on disk, and a file with an answer is not answered again, so a kill loses
nothing. File names stay on this machine: they are neither logged nor given to `answer`.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import IntakeError, Limits
from mergestream.data.intake.pictures import Picture
from mergestream.runtime.errors import InputError, MergestreamError, OutputError
from mergestream.runtime.files import lock_or_refuse, make_folder
from mergestream.serving.answer_queue import ClosingError, OverloadedError
from mergestream.serving.dropbox import Dropbox, ImageAnswer, Incoming
from mergestream.serving.http.routes.image_routes import answer_document
from mergestream.serving.reports.structured_report import write_report
from mergestream.serving.service import WATCHED, Service
from mergestream.serving.worker_thread import WorkerThread

Answer = Callable[[list[Picture]], list[ImageAnswer]]
log = logging.getLogger(__name__)


def answer_images(service: Service, reports: bool, pictures: list[Picture]) -> list[ImageAnswer]:
    """Answers of a service to a batch of files; with structured reports where `reports` asks for them."""
    answer = service.answer_from_thread(WATCHED, pictures)
    concepts = service.class_concepts() if reports else {}
    return [
        ImageAnswer(
            answer_document(answer.of(row)).model_dump(),
            write_report(picture, answer, row, concepts) if reports else None,
        )
        for row, picture in enumerate(pictures)
    ]


@dataclass(frozen=True)
class Pace:
    """Size of a batch, and times in seconds."""

    batch_size: int = 32  # images
    batch_seconds: float = 5.0  # how long the first file waits for others
    look_seconds: float = 1.0  # between two listings
    retry_seconds: float = 30.0  # after a failure that is not the file's fault


class Watcher(WorkerThread):
    """Answers the files in a folder, in batches. `failed`: an error has ended it."""

    def __init__(self, folder: Path, answer: Answer, limits: Limits | None = None, pace: Pace | None = None) -> None:
        super().__init__("watched folder", "the watched folder is no longer answered")
        self._folder, self._answer, self._limits, self._pace = folder, answer, limits or Limits(), pace or Pace()
        self._first_ready_at: float | None = None
        self._retry_at: dict[str, float] = {}

    def work(self) -> None:
        self.watch()

    def watch(self) -> None:
        """Answer files until `end` is called, in the calling thread."""
        others = f"{self._folder} is watched by another mergestream process. Stop it, or choose another folder."
        lock = lock_or_refuse(make_folder(self._folder) / ".watching.lock", OutputError(others))
        try:
            self._box = Dropbox(self._folder)
            while not self._ending.is_set():
                self._look()
                self._ending.wait(self._pace.look_seconds)
            self._look(last=True)
        finally:
            os.close(lock)

    def _look(self, last: bool = False) -> None:
        """Answer complete files if they fill a batch or have waited long enough."""
        now = time.monotonic()
        self._retry_at = {name: then for name, then in self._retry_at.items() if then > now}
        ready = [name for name in self._box.complete_names() if name not in self._retry_at]
        self._first_ready_at = (self._first_ready_at or now) if ready else None
        waited = self._first_ready_at is not None and now - self._first_ready_at >= self._pace.batch_seconds
        if last or waited or len(ready) >= self._pace.batch_size:
            self._first_ready_at = None
            for batch in self._batches(ready):
                self._answer_batch(batch)

    def _batches(self, names: Sequence[str]) -> Iterator[list[Incoming]]:
        """Read files into batches. A batch ends when it is full or as large as a request may be."""
        batch, pictures, size = list[Incoming](), 0, 0
        for name in names:
            if self._give_up.is_set():
                return
            incoming = self._read(name)
            if incoming is None:
                continue
            more = sum(picture.pixels.nbytes for picture in incoming.pictures)
            if batch and (
                pictures + len(incoming.pictures) > self._pace.batch_size or size + more > self._limits.decoded_bytes
            ):
                yield batch
                batch, pictures, size = [], 0, 0
            batch.append(incoming)
            pictures, size = pictures + len(incoming.pictures), size + more
        if batch:
            yield batch

    def _read(self, name: str) -> Incoming | None:
        """A file's images; None if it is gone, refused, or already answered."""
        with self._retried_if_failed(name):
            try:
                data = self._box.content(name, self._limits.file_bytes)
                if data is not None and not self._box.move_if_answered(name, data):
                    return Incoming(name, read_upload(data, self._limits))
            except IntakeError as error:
                self._refuse(name, error.code, error.sentence)
        return None

    def _answer_batch(self, batch: list[Incoming]) -> None:
        """Answer a batch; if that fails, each of its files alone, so that one bad file does not block the others."""
        pictures = [picture for incoming in batch for picture in incoming.pictures]
        try:
            answers = self._answer(pictures)
            if len(answers) != len(pictures):
                raise RuntimeError(f"{len(pictures)} pictures got {len(answers)} answers")
        except (OutputError, OverloadedError, ClosingError) as error:  # for example a full disk
            self._retry_later([incoming.name for incoming in batch], error)
        except Exception as error:
            if len(batch) > 1:
                for incoming in batch:
                    self._answer_batch([incoming])
            elif isinstance(error, InputError):
                self._refuse(batch[0].name, "not_answered", "The model cannot take this image.")
            else:
                self._retry_later([batch[0].name], error)
        else:
            rest = iter(answers)
            for incoming in batch:
                with self._retried_if_failed(incoming.name):
                    self._box.store_answer(incoming, list(islice(rest, len(incoming.pictures))))

    def _refuse(self, name: str, code: str, sentence: str) -> None:
        log.info("a file was refused: %s", code)
        with self._retried_if_failed(name):
            self._box.refuse(name, code, sentence)

    @contextmanager
    def _retried_if_failed(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, MergestreamError) as error:
            self._retry_later([name], error)

    def _retry_later(self, names: Sequence[str], error: Exception) -> None:
        log.warning("%d files will be tried again later: %s", len(names), type(error).__name__)
        self._retry_at |= dict.fromkeys(names, time.monotonic() + self._pace.retry_seconds)
