"""A background thread that ends gracefully, and whose failure shows in the health checks."""

import logging
import math
import threading

from mergestream.runtime.errors import MergestreamError

log = logging.getLogger(__name__)


class WorkerThread(threading.Thread):
    """Calls `work` once, which returns soon after `_ending` is set, and at once when `_give_up` is.

    `failed`: an error has ended it.
    """

    failed = False

    def __init__(self, name: str, failure: str, *, daemon: bool | None = None) -> None:
        super().__init__(name=name, daemon=daemon)
        self._failure = failure  # what the log says before the reason
        self._ending, self._give_up = threading.Event(), threading.Event()

    def end(self, seconds: float = math.inf) -> None:
        """End after the work that is complete, or when the time is over; the rest waits on disk."""
        self._ending.set()
        if self.ident is not None:
            self.join(min(seconds, threading.TIMEOUT_MAX))
            self._give_up.set()
            self.join()

    def work(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        try:
            self.work()
        except Exception as error:
            # Messages of other errors may name a file.
            why = str(error) if isinstance(error, MergestreamError) else type(error).__name__
            log.error("%s: %s", self._failure, why)
            self.failed = True
