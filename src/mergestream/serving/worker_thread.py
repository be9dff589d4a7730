"""A background thread that answers items in batches, ends gracefully, and whose failure shows in the health checks."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from mergestream.data.intake.limits import IntakeError, Limits
from mergestream.data.intake.pictures import Picture
from mergestream.runtime.errors import InputError, MergestreamError, OutputError
from mergestream.serving.answer_queue import ClosingError, OverloadedError

# Errors that are not an item's fault, such as a full disk. After a timeout a step may be logged: a batch is not split.
TEMPORARY = (OutputError, OverloadedError, ClosingError, TimeoutError)
Item = TypeVar("Item")
Result = TypeVar("Result")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """Size of a batch, and times in seconds."""

    batch_size: int = 32  # images
    batch_seconds: float = 5.0  # how long the first item waits for others
    look_seconds: float = 1.0  # between two listings
    retry_seconds: float = 30.0  # after a failure that is not the item's fault


class BatchingWorker(threading.Thread, Generic[Item]):
    """Answers items, each with one image or more, in batches. Subclasses list, read, refuse and store them.

    `failed`: an error has ended it.
    """

    noun = "item"  # in the log
    failed = False

    def __init__(self, name: str, failure: str, limits: Limits, pace: Pace, *, daemon: bool | None = None) -> None:
        super().__init__(name=name, daemon=daemon)
        self._failure = failure  # what the log says before the reason
        self._limits, self._pace = limits, pace
        self._ending, self._give_up = threading.Event(), threading.Event()
        self._retry_at: dict[Item, float] = {}

    def run(self) -> None:
        try:
            self.work()
        except Exception as error:
            # Messages of other errors may name a file.
            why = str(error) if isinstance(error, MergestreamError) else type(error).__name__
            log.error("%s: %s", self._failure, why)
            self.failed = True

    def end(self, seconds: float = math.inf) -> None:
        """End after the work that is complete, or when the time is over; the rest waits on disk."""
        self._ending.set()
        if self.ident is not None:
            self.join(min(seconds, threading.TIMEOUT_MAX))
            self._give_up.set()
            self.join()

    def work(self) -> None:
        """Answer items; return soon after `_ending` is set, and at once when `_give_up` is."""
        raise NotImplementedError

    def read(self, item: Item) -> list[Picture]:
        """The images of an item; none if it needs no answer. IntakeError: it is refused."""
        raise NotImplementedError

    def set_aside(self, item: Item, code: str, sentence: str) -> None:
        """Move a refused item away, with the reason."""
        raise NotImplementedError

    def due(self, items: Iterable[Item]) -> list[Item]:
        """The items that do not wait for another try."""
        now = time.monotonic()
        self._retry_at = {item: then for item, then in self._retry_at.items() if then > now}
        return [item for item in items if item not in self._retry_at]

    def answer_items(
        self,
        items: Iterable[Item],
        answer: Callable[[list[Picture]], Result],
        store: Callable[[Item, list[Picture], Result, int], None],
    ) -> None:
        """Answer items in batches. `store` gets an item with its images, the batch's result and its first row there."""
        for batch in self._batches(items):
            self._answer_batch(batch, answer, store)

    def _batches(self, items: Iterable[Item]) -> Iterator[list[tuple[Item, list[Picture]]]]:
        """Read items into batches. A batch ends when it is full or as large as a request may be."""
        batch, count, size = list[tuple[Item, list[Picture]]](), 0, 0
        for item in items:
            if self._give_up.is_set():
                return
            pictures = self._read(item)
            if not pictures:
                continue
            more = sum(picture.pixels.nbytes for picture in pictures)
            if batch and (count + len(pictures) > self._pace.batch_size or size + more > self._limits.decoded_bytes):
                yield batch
                batch, count, size = [], 0, 0
            batch.append((item, pictures))
            count, size = count + len(pictures), size + more
        if batch:
            yield batch

    def _read(self, item: Item) -> list[Picture]:
        with self._retried_if_failed(item):
            try:
                return self.read(item)
            except IntakeError as error:
                self.refuse(item, error.code, error.sentence)
        return []

    def _answer_batch(
        self,
        batch: Sequence[tuple[Item, list[Picture]]],
        answer: Callable[[list[Picture]], Result],
        store: Callable[[Item, list[Picture], Result, int], None],
    ) -> None:
        """Answer a batch; if that fails, each of its items alone, so that one bad item does not block the others."""
        items = [item for item, _ in batch]
        try:
            result = answer([picture for _, pictures in batch for picture in pictures])
        except TEMPORARY as error:
            self.retry_later(items, error)
        except Exception as error:
            if len(batch) > 1:
                for one in batch:
                    self._answer_batch([one], answer, store)
            elif isinstance(error, InputError):
                self.refuse(items[0], "not_answered", "The model cannot take this image.")
            else:
                self.retry_later(items, error)
        else:
            row = 0
            for item, pictures in batch:
                with self._retried_if_failed(item):
                    store(item, pictures, result, row)
                row += len(pictures)

    def refuse(self, item: Item, code: str, sentence: str) -> None:
        log.info("a %s was refused: %s", self.noun, code)
        with self._retried_if_failed(item):
            self.set_aside(item, code, sentence)

    @contextmanager
    def _retried_if_failed(self, item: Item) -> Iterator[None]:
        try:
            yield
        except (OSError, MergestreamError) as error:
            self.retry_later([item], error)

    def retry_later(self, items: Sequence[Item], error: Exception | None = None) -> None:
        if error is not None:
            log.warning("%d %ss will be tried again later: %s", len(items), self.noun, type(error).__name__)
        self._retry_at |= dict.fromkeys(items, time.monotonic() + self._pace.retry_seconds)
