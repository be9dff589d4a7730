"""The thread that answers a watched folder through the service."""

import logging
import threading
from pathlib import Path
from typing import Any

from mergestream.data.intake import Picture
from mergestream.runtime.errors import MergestreamError
from mergestream.serving.engine.answers import Answer
from mergestream.serving.http.routes.image_routes import answer_document
from mergestream.serving.service import Service
from mergestream.serving.watched_folder.watcher import watch

STREAM = "watched-folder"
log = logging.getLogger(__name__)


class FolderThread:
    """Started by the service when it is ready, and stopped before its engine is closed."""

    def __init__(self, service: Service, folder: Path, stream: str = STREAM, *, reports: bool = False) -> None:
        self._service, self._folder, self._stream, self._reports = service, folder, stream, reports
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watched folder")
        self._last: tuple[list[Picture], Answer] | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after answering the files that are complete."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        report = self._report if self._reports else None
        try:
            watch(self._folder, self._answer, self._stop, limits=self._service.limits.intake, report=report)
        except Exception as error:
            # Messages of other errors may name a file.
            why = str(error) if isinstance(error, MergestreamError) else type(error).__name__
            log.error("the watched folder is no longer answered: %s", why)
            self._service.folder_failed = True

    def _answer(self, pictures: list[Picture]) -> list[dict[str, Any]]:
        answer = self._service.answer_from_thread(self._stream, pictures)
        self._last = (pictures, answer)
        return [answer_document(answer.of(row)).model_dump() for row in range(len(pictures))]

    def _report(self, picture: Picture, _: dict[str, Any]) -> bytes:
        """Called right after the batch with this image, by the same thread."""
        assert self._last is not None
        pictures, answer = self._last
        from mergestream.serving.structured_report import write_report

        return write_report(picture, answer, next(row for row, each in enumerate(pictures) if each is picture))
