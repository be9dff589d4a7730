"""A watched folder, for sites without HTTP: complete files are answered in batches through the service.

A file is moved only after its answer is on disk, and a file with an answer is not answered again, so a kill loses
nothing. File names stay on this machine: they are neither logged nor given to `answer`.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import Limits
from mergestream.data.intake.pictures import Picture
from mergestream.runtime.errors import OutputError
from mergestream.runtime.files import lock_or_refuse, make_folder
from mergestream.serving.dropbox import Dropbox, ImageAnswer
from mergestream.serving.http.routes.image_routes import answer_document
from mergestream.serving.service import WATCHED, Service
from mergestream.serving.worker_thread import BatchingWorker, Pace

Answer = Callable[[list[Picture]], list[ImageAnswer]]


def answer_images(service: Service, reports: bool, pictures: list[Picture]) -> list[ImageAnswer]:
    """Answers of a service to a batch of files; with structured reports where `reports` asks for them."""
    from mergestream.serving.reports.structured_report import write_report  # highdicom: not while the service starts

    answer = service.answer_from_thread(WATCHED, pictures)
    concepts = service.class_concepts() if reports else {}
    return [
        ImageAnswer(
            answer_document(answer.of(row)).model_dump(),
            write_report(picture, answer, row, concepts) if reports else None,
        )
        for row, picture in enumerate(pictures)
    ]


class Watcher(BatchingWorker[str]):
    """Answers the files in a folder, in batches. `failed`: an error has ended it."""

    noun = "file"

    def __init__(self, folder: Path, answer: Answer, limits: Limits | None = None, pace: Pace | None = None) -> None:
        super().__init__(
            "watched folder", "the watched folder is no longer answered", limits or Limits(), pace or Pace()
        )
        self._folder, self._answer = folder, answer
        self._first_ready_at: float | None = None

    def work(self) -> None:
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
        now, ready = time.monotonic(), self.due(self._box.complete_names())
        self._first_ready_at = (self._first_ready_at or now) if ready else None
        waited = self._first_ready_at is not None and now - self._first_ready_at >= self._pace.batch_seconds
        if last or waited or len(ready) >= self._pace.batch_size:
            self._first_ready_at = None
            self.answer_items(ready, self._answer, self._store)

    def read(self, name: str) -> list[Picture]:
        """A file's images; none if it is gone or already answered."""
        data = self._box.content(name, self._limits.file_bytes)
        return [] if data is None or self._box.move_if_answered(name, data) else read_upload(data, self._limits)

    def _store(self, name: str, pictures: list[Picture], answers: list[ImageAnswer], row: int) -> None:
        self._box.store_answer(name, pictures[0].sha256, answers[row : row + len(pictures)])

    def set_aside(self, name: str, code: str, sentence: str) -> None:
        self._box.refuse(name, code, sentence)
