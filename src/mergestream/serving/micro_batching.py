"""Micro-batching: single images of a stream are answered in batches, and each caller gets its own answer."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field

from mergestream.data.intake.pictures import Picture
from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.option_checks import number, whole_number
from mergestream.serving.engine.answers import Answer
from mergestream.serving.engine.registry import require_name


class OverloadedError(MergestreamError):
    """Too much work is waiting; the caller may try again later."""


class ClosingError(MergestreamError):
    """The service is shutting down: it finishes accepted work and refuses new work."""


@dataclass(frozen=True)
class BatchingSettings:
    """count        largest batch
    seconds      how long the first image waits for others
    waiting      images of all streams that may wait or be in progress
    per_stream   the same per stream, so that a busy scanner leaves room for the others
    """

    count: int = 32
    seconds: float = 0.05
    waiting: int = 1024
    per_stream: int = 512

    def __post_init__(self) -> None:
        for limit in ("count", "waiting", "per_stream"):
            whole_number(limit, getattr(self, limit), low=1)
        number("seconds", self.seconds, low=0)


@dataclass
class _Case:
    picture: Picture
    answer: asyncio.Future[Answer]
    since: float  # by the event loop's clock


@dataclass
class _Queue:
    """The waiting cases of one stream, in order of arrival, and the task that answers them."""

    cases: list[_Case] = field(default_factory=list)
    in_progress: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self.cases) + self.in_progress


class MicroBatcher:
    """For one event loop. `answer` runs in `executor` (None: the loop's default)."""

    def __init__(
        self,
        answer: Callable[[str, Sequence[Picture]], Answer],
        settings: BatchingSettings | None = None,
        executor: Executor | None = None,
    ) -> None:
        self._answer, self._executor = answer, executor
        self.settings = settings or BatchingSettings()
        self._queues: dict[str, _Queue] = {}
        self._closing = False

    def __len__(self) -> int:
        """Images that wait or are in progress."""
        return sum(map(len, self._queues.values()))

    async def submit(self, stream: str, picture: Picture) -> Answer:
        """Answer one image. A caller may give up: its image leaves the batch if that has not started."""
        queue = self._queue_for(require_name(stream))
        loop = asyncio.get_running_loop()
        case = _Case(picture, loop.create_future(), loop.time())
        queue.cases.append(case)
        if len(queue.cases) >= self.settings.count:
            queue.full.set()
        if queue.task is None:
            queue.task = asyncio.create_task(self._work(stream, queue))
        return await case.answer

    async def close(self) -> None:
        """Refuse new images and finish accepted ones."""
        self._closing = True
        for queue in self._queues.values():
            queue.full.set()
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        await asyncio.gather(*tasks)

    def _queue_for(self, stream: str) -> _Queue:
        if self._closing:
            raise ClosingError("The service is shutting down. Send this image again when it is back.")
        queue = self._queues.get(stream, _Queue())
        if len(self) >= self.settings.waiting or len(queue) >= self.settings.per_stream:
            raise OverloadedError("Too many images are waiting. Try again in a moment.")
        return self._queues.setdefault(stream, queue)

    async def _work(self, stream: str, queue: _Queue) -> None:
        """Answer the cases of a stream, batch by batch, until none is left."""
        while queue.cases:
            await self._wait_for_batch(queue)
            # Images of callers who gave up must not change the averages.
            batch = [case for case in queue.cases[: self.settings.count] if not case.answer.done()]
            del queue.cases[: self.settings.count]
            queue.in_progress = len(batch)
            if len(queue.cases) < self.settings.count and not self._closing:
                queue.full.clear()
            await self._answer_batch(stream, batch)
            queue.in_progress = 0
        del self._queues[stream]

    async def _wait_for_batch(self, queue: _Queue) -> None:
        """Wait until the batch is full or its first case has waited long enough."""
        due = queue.cases[0].since + self.settings.seconds
        with suppress(TimeoutError):
            await asyncio.wait_for(queue.full.wait(), max(0.0, due - asyncio.get_running_loop().time()))

    async def _answer_batch(self, stream: str, cases: Sequence[_Case]) -> None:
        """Answer each case. A refused batch is halved until the bad images are alone."""
        if not cases:
            return
        try:
            pictures = [case.picture for case in cases]
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._executor, self._answer, stream, pictures)
        except InputError as error:
            if len(cases) == 1:
                _fail(cases[0], error)
                return
            middle = len(cases) // 2
            await self._answer_batch(stream, cases[:middle])
            await self._answer_batch(stream, cases[middle:])
        except Exception as error:
            for case in cases:
                _fail(case, error)
        else:
            for position, case in enumerate(cases):
                if not case.answer.done():
                    case.answer.set_result(answer.of(position))


def _fail(case: _Case, error: Exception) -> None:
    if not case.answer.done():
        case.answer.set_exception(error)
