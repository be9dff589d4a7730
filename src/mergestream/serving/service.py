"""The running service: an engine in worker threads, the requests that wait for it, start and shutdown."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, Union

from mergestream.data.intake.pictures import Picture
from mergestream.serving.answer_queue import AnswerQueue
from mergestream.serving.audit.line_kinds import CHANGE, CHECKED, STOPPED
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.decode_queue import DecodeQueue
from mergestream.serving.engine.answers import Answer
from mergestream.serving.http.problems import Problem
from mergestream.serving.http.request_limits import HeldBytes, RateLimiter, ServiceLimits
from mergestream.serving.http.tokens import Tokens
from mergestream.serving.monitoring import Metrics
from mergestream.serving.quality.quality_gauges import QualityGauges
from mergestream.serving.stream_owners import StreamOwners
from mergestream.serving.tracing import span

if TYPE_CHECKING:
    from mergestream.serving.dicom_network.node import DicomNode
    from mergestream.serving.dicom_network.results import Delivery
    from mergestream.serving.engine.engine import Engine
    from mergestream.serving.replicas.replicated_engine import ReplicatedEngine
    from mergestream.serving.reports.report_sending import ReportSending
    from mergestream.serving.watched_folder import Watcher
    from mergestream.serving.webhook import Webhook

# The engine computes one batch at a time; meanwhile the other thread sends, and may write the audit log.
ENGINE_THREADS = 2
CHECK_SECONDS = 5.0
WATCHED = "watched-folder"  # the stream of the watched folder
AnyEngine = Union["Engine", "ReplicatedEngine"]
T = TypeVar("T")
log = logging.getLogger(__name__)


class Service:
    """For one event loop. `start` opens the engine, `stop` finishes accepted work and releases everything."""

    def __init__(
        self,
        open_engine: Callable[[Metrics], AnyEngine],
        limits: ServiceLimits | None = None,
        *,
        tokens: Tokens | None = None,
        hosts: Sequence[str] | None = None,
        owners: StreamOwners | None = None,
        threads: int = ENGINE_THREADS,
    ) -> None:
        """`hosts`: allowed names in the Host header (None: any).

        `threads`: batches in progress at a time; with one thread changes are made in it, too.
        """
        self.limits, self.tokens, self.hosts = limits or ServiceLimits(), tokens, hosts
        self.owners = owners or StreamOwners()
        self.metrics = Metrics()
        self.held, self.rates = HeldBytes(self.limits.held_bytes), RateLimiter(self.limits.rate, self.limits.burst)
        self.requests_in_progress = 0
        self.closing = False
        self.folder: Watcher | None = None  # started when the service is ready
        self.webhook: Webhook | None = None
        self.node: DicomNode | None = None  # started when the service is ready
        self.sending: ReportSending | None = None  # of reports; started when the service is ready
        self.delivery: Delivery | None = None  # of results to other systems; None: they stay in the API and the log
        self._open_engine = open_engine
        self._engine: AnyEngine | None = None
        self._engine_threads = ThreadPoolExecutor(threads, "engine")
        self._queue = AnswerQueue(self.answer, self.limits.queue, self._engine_threads, threads)
        self._decoders = DecodeQueue(self.limits.intake)
        self._administration = self._engine_threads if threads == 1 else ThreadPoolExecutor(1, "administration")
        self._log_checked_at = 0.0
        self.metrics.add_gauge("queue_length", "Images waiting or in progress.", lambda: len(self._queue))
        self.metrics.add_gauge("streams", "Streams that the service keeps.", lambda: len(self.stream_names()))
        self.metrics.registry.register(QualityGauges(lambda: self._engine.streams() if self._engine else []))
        self.metrics.add_gauge("held_bytes", "Bytes held by requests.", lambda: self.held.total)
        self.metrics.add_gauge("requests_under_way", "Requests in progress.", lambda: self.requests_in_progress)

    @property
    def loading(self) -> bool:
        return self._engine is None

    @property
    def engine(self) -> AnyEngine:
        if self._engine is None:
            raise Problem("loading", "The service is loading its pool. Try again in a moment.")
        return self._engine

    def stream_names(self) -> list[str]:
        return [] if self._engine is None else [each["stream"] for each in self._engine.streams()]

    def class_concepts(self) -> dict[str, dict[str, str]]:
        """Codes of the classes for reports, from the experts' cards."""
        concepts: dict[str, dict[str, str]] = self.engine.describe()["class_concepts"]
        return concepts

    async def start(self) -> None:
        engine = await self._run(self._administration, self._open_engine, self.metrics)
        for time_of_line, answer in await self._run(self._administration, engine.history):
            self.metrics.keep(answer, time_of_line)
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self.owners.keep_only(self.stream_names())
        if self.sending is not None:
            self.sending.start(self.metrics)
        if self.folder is not None:
            self.owners.reserve(WATCHED)
            self.folder.start()
        if self.node is not None:
            for stream in self.node.streams:
                self.owners.reserve(stream)
            self.node.add_metrics(self.metrics)
            classes = engine.describe()["classes"]
            self.node.start(self.answer_from_thread, self.delivery, self.limits.intake, classes)

    async def stop(self, seconds: float = math.inf) -> None:
        """Finish accepted work, log the end and release everything. AuditError: the end could not be logged.

        `seconds`: how long the watched folder and the DICOM node may go on with files that are complete.
        """
        self.closing = True
        if self.folder is not None:
            await asyncio.to_thread(self.folder.end, seconds)
        if self.node is not None:
            await asyncio.to_thread(self.node.end, seconds)
        await self._queue.close()
        self._decoders.close()  # no request is left to wait for a decoder
        if self._engine_threads is not self._administration:
            await asyncio.to_thread(self._engine_threads.shutdown)
        try:
            if self._engine is not None:
                await self._run(self._administration, self._close, self._engine)
        finally:
            await asyncio.to_thread(self._administration.shutdown)
            if self.webhook is not None:
                await asyncio.to_thread(self.webhook.close)
            if self.sending is not None:
                await asyncio.to_thread(self.sending.stop)

    def answer(self, stream: str, pictures: Sequence[Picture], single: bool = False) -> Answer:
        """Answer a batch in the calling thread, which must be one of the engine's. `single`: image by image."""
        answer = self.engine.answer(stream, pictures, single=single)
        for step in answer.steps:
            self.metrics.step(step)
            if self.webhook is not None:
                self.webhook.send(stream, step.begun)
        return answer

    def answer_from_thread(self, stream: str, pictures: Sequence[Picture]) -> Answer:
        """Answer a batch for a thread outside the event loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(self.answer_batch(stream, pictures), self._loop).result()

    async def answer_batch(
        self, stream: str, pictures: Sequence[Picture], *, single: bool = False, one: bool = False
    ) -> Answer:
        """Answer a batch, or `one` image, after the stream's earlier ones, within the time limit."""
        async with asyncio.timeout(self.limits.answer_seconds):
            return await self._queue.answer(stream, pictures, single=single, one=one)

    async def decode(self, stream: str, files: Sequence[bytes]) -> list[Picture]:
        """Decode the files of a request. They count as waiting already."""
        with self._queue.counted(stream, len(files)), span("decode", files=len(files)):
            async with asyncio.timeout(self.limits.answer_seconds):
                return await self._decoders.decode(stream, files)

    async def change(self, what: str, caller: Any, function: Callable[[], T]) -> T:
        """Make an administrator's change after logging whose token asked for it. Changes run one at a time."""
        audit_log = self.engine.audit
        body = {"change": what, "by": caller.holder.name, "request_id": caller.request_id}

        def logged_change() -> T:
            audit_log.append(CHANGE, body)
            return function()

        return await self._run(self._administration, logged_change)

    async def why_not_ready(self) -> str | None:
        """The problem code, or None. A failing log is tried again, since without requests nothing else would."""
        if self.closing:
            return "closing"
        if self._engine is None:
            return "loading"
        audit_log = self._engine.audit
        if audit_log.failing is not None and time.monotonic() - self._log_checked_at > CHECK_SECONDS:
            self._log_checked_at = time.monotonic()
            try:
                await self._run(self._administration, audit_log.append, CHECKED, {})
            except AuditError:
                log.warning("the audit log still cannot be written")
        if audit_log.failing is not None:
            return "audit_unavailable"
        if self.node is not None and self.node.failed:
            return "node_failed"
        return "not_watching" if self.folder is not None and self.folder.failed else None

    @staticmethod
    def _close(engine: AnyEngine) -> None:
        try:
            streams = [{"stream": each["stream"], "steps": each["steps"]} for each in engine.streams()]
            engine.audit.append(STOPPED, {"streams": streams})
        finally:
            engine.close()

    async def _run(self, threads: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
