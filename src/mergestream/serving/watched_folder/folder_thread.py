"""A watched folder as one more client of the service: a thread that answers what is put into it."""

import logging
import threading
from pathlib import Path
from typing import Any

from mergestream.data.intake import Picture
from mergestream.runtime.errors import MergestreamError
from mergestream.serving.engine.answers import Answer
from mergestream.serving.http.routes.image_routes import report_of, shown
from mergestream.serving.service import Service
from mergestream.serving.watched_folder.watcher import watch

STREAM = "watched-folder"
log = logging.getLogger(__name__)


class FolderThread:
    """Started once the service is ready; ended before it lets go of its engine."""

    def __init__(self, service: Service, folder: Path, stream: str = STREAM, *, reports: bool = False) -> None:
        self._service, self._folder, self._stream, self._reports = service, folder, stream, reports
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watched folder")
        self._last: tuple[list[Picture], Answer] | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Files that were complete are still answered."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        report = self._report if self._reports else None
        try:
            watch(self._folder, self._answer, self._stop, limits=self._service.limits.intake, report=report)
        except Exception as error:
            # Another error's words may name a file.
            why = str(error) if isinstance(error, MergestreamError) else type(error).__name__
            log.error("the watched folder is left alone from now on: %s", why)
            self._service.not_watching = "not_watching"

    def _answer(self, pictures: list[Picture]) -> list[dict[str, Any]]:
        answer = self._service.answer_now(self._stream, pictures)
        self._last = (pictures, answer)
        return [shown(answer.of(row)).model_dump() for row in range(len(pictures))]

    def _report(self, picture: Picture, _: dict[str, Any]) -> bytes:
        """Asked for right after the batch that held the picture, by the same thread."""
        assert self._last is not None
        pictures, answer = self._last
        return report_of(picture, answer, next(row for row, each in enumerate(pictures) if each is picture))
