"""The running service behind its routes: an engine in worker threads, what waits for it, and how it ends."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from mergestream.data.intake import Picture, read_uploads
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.engine.answers import Answer
from mergestream.serving.http.problems import Problem
from mergestream.serving.http.request_limits import HeldBytes, RateLimiter, ServiceLimits
from mergestream.serving.http.tokens import Tokens
from mergestream.serving.metrics import Metrics
from mergestream.serving.micro_batching import MicroBatcher
from mergestream.serving.opening import Answering, Companion, Opened
from mergestream.serving.recent import RecentSteps

STOPPED, CHECKED, ASKED = "service_stopped", "log_checked", "change_asked"
# The engine lets one of them compute at a time; the others write the audit log meanwhile.
ENGINE_THREADS = 4
CHECK_SECONDS = 5.0
T = TypeVar("T")
log = logging.getLogger(__name__)


class Service:
    """For one event loop. Made before anything is loaded; `start` loads, `stop` ends it in order."""

    def __init__(
        self,
        open_engine: Callable[[Metrics], Opened],
        limits: ServiceLimits | None = None,
        *,
        tokens: Tokens | None = None,
        hosts: Sequence[str] | None = None,
        one_thread: bool = False,
        threads: int = ENGINE_THREADS,
    ) -> None:
        """`one_thread`: all work on the device in one thread. A GPU needs it: no other may touch it while a step is
        recorded there. `threads`: batches under way at a time otherwise."""
        self.limits = limits or ServiceLimits()
        self.tokens = tokens
        self.hosts = hosts  # names that requests may be addressed to; None: any
        self.metrics, self.recent = Metrics(), RecentSteps()
        self.held, self.rates = HeldBytes(self.limits.held_bytes), RateLimiter(self.limits.rate, self.limits.burst)
        self.under_way = 0  # requests
        self.closing = False
        self.not_watching: str | None = None  # why the watched folder is left alone
        self._open_engine = open_engine
        self._opened: Opened | None = None
        self._batcher: MicroBatcher | None = None
        self._engine_threads = ThreadPoolExecutor(1 if one_thread else threads, "engine")
        self._decoders = ThreadPoolExecutor(max(2, os.cpu_count() or 1), "decoder")
        self._administration = self._engine_threads if one_thread else ThreadPoolExecutor(1, "administration")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._batches_waiting, self._checked_at = 0, 0.0
        self._companions: list[Companion] = []
        self._watch_metrics()

    @property
    def engine(self) -> Answering:
        if self._opened is None:
            raise self._loading()
        return self._opened.engine

    def attend(self, companion: Companion) -> None:
        self._companions.append(companion)

    async def start(self) -> None:
        opened = await self.administer(lambda: self._open_engine(self.metrics))
        self._batcher = MicroBatcher(self.answer, self.limits.batching, self._engine_threads)
        self._opened = opened
        for companion in self._companions:
            companion.start()

    async def stop(self) -> None:
        """Finish what was accepted, say so in the log, let go of everything. AuditError: the log does not say so."""
        self.closing = True
        for companion in self._companions:
            await asyncio.to_thread(companion.stop)
        if self._batcher is not None:
            await self._batcher.close()
        await asyncio.to_thread(self._decoders.shutdown)
        if self._engine_threads is not self._administration:
            await asyncio.to_thread(self._engine_threads.shutdown)
        try:
            if self._opened is not None:
                await self.administer(self._let_go, self._opened)
        finally:
            await asyncio.to_thread(self._administration.shutdown)

    def answer_now(self, stream: str, pictures: Sequence[Picture]) -> Answer:
        """For threads of others, who wait for it."""
        return self._engine_threads.submit(self.answer, stream, pictures).result()

    def answer(self, stream: str, pictures: Sequence[Picture]) -> Answer:
        """For the engine's threads: its answer, remembered for whoever watches."""
        answer = self.engine.answer(stream, pictures)
        self.metrics.step(answer)
        self.recent.add(answer)
        return answer

    async def answer_batch(self, stream: str, pictures: Sequence[Picture]) -> Answer:
        """In turn with the stream's other batches, so that one stream keeps one thread busy at most."""
        turn = self._turns.setdefault(stream, asyncio.Lock())
        self._batches_waiting += len(pictures)
        try:
            async with asyncio.timeout(self.limits.answer_seconds), turn:
                return await self._in(self._engine_threads, self.answer, stream, pictures)
        finally:
            self._batches_waiting -= len(pictures)

    async def answer_one(self, stream: str, picture: Picture) -> Answer:
        """Together with whatever else comes in for the stream just now."""
        self.engine  # noqa: B018 while it loads there is no batcher
        assert self._batcher is not None
        async with asyncio.timeout(self.limits.answer_seconds):
            return await self._batcher.submit(stream, picture)

    async def decode(self, files: Sequence[bytes]) -> list[Picture]:
        async with asyncio.timeout(self.limits.answer_seconds):
            return await self._in(self._decoders, read_uploads, files, self.limits.intake)

    async def administer(self, function: Callable[..., T], *arguments: Any) -> T:
        """What changes the service, one after the other and apart from answers."""
        return await self._in(self._administration, function, *arguments)

    async def change(self, what: str, asked: Any, function: Callable[[], T]) -> T:
        """Administer, after the log says whose token asked for it; what came of it is the engine's next event."""
        opened = self._opened
        if opened is None:
            raise self._loading()
        body = {"change": what, "by": asked.holder.name, "request_id": asked.request_id}

        def changed() -> T:
            opened.audit.append(ASKED, body)
            return function()

        return await self.administer(changed)

    async def why_not_ready(self) -> str | None:
        """A log that fails is tried again now and then: without requests it would never be found mended."""
        if self.closing:
            return "closing"
        if self._opened is None:
            return "loading"
        if self._opened.audit.failing is not None and time.monotonic() - self._checked_at > CHECK_SECONDS:
            self._checked_at = time.monotonic()
            try:
                await self.administer(self._opened.audit.append, CHECKED, {})
            except AuditError:
                log.warning("the audit log still cannot be written")
        return "audit_unavailable" if self._opened.audit.failing is not None else self.not_watching

    @staticmethod
    def _loading() -> Problem:
        return Problem("loading", "The service is loading its pool. Try again in a moment.")

    def _let_go(self, opened: Opened) -> None:
        try:
            streams = [{"stream": each["stream"], "steps": each["steps"]} for each in opened.engine.streams()]
            opened.audit.append(STOPPED, {"streams": streams})
        finally:
            opened.engine.close()
            opened.audit.close()

    async def _in(self, threads: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)

    def _watch_metrics(self) -> None:
        def streams() -> int:
            return 0 if self._opened is None else len(self._opened.engine.streams())

        def waiting() -> int:
            return self._batches_waiting + (0 if self._batcher is None else len(self._batcher))

        self.metrics.watch("queue_length", "Pictures that wait or are under way.", waiting)
        self.metrics.watch("streams", "Streams that the service keeps.", streams)
        self.metrics.watch("held_bytes", "Bytes that requests hold.", lambda: self.held.total)
        self.metrics.watch("requests_under_way", "Requests that are being answered.", lambda: self.under_way)
