"""Micro-batching: single cases of a stream are gathered by count or time, and each caller gets its own answer."""

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
    """More work waits than the service may hold; the caller may try again later."""


class ClosingError(MergestreamError):
    """The service is shutting down: what it accepted is finished, nothing new is."""


@dataclass(frozen=True)
class BatchingSettings:
    """count        pictures that are answered together at most
    seconds      how long the first of them waits for others
    waiting      pictures of all streams that may wait or be under way
    per_stream   and of one stream, so that a busy scanner leaves room for the others
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
    since: float  # of the loop's clock


@dataclass
class _Queue:
    """One stream's cases in order of arrival, and the task that answers them."""

    cases: list[_Case] = field(default_factory=list)
    under_way: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self.cases) + self.under_way


class MicroBatcher:
    """For one event loop. `answer` is the engine's and runs in `executor` (None: the loop's own)."""

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
        """Pictures that wait or are under way."""
        return sum(map(len, self._queues.values()))

    async def submit(self, stream: str, picture: Picture) -> Answer:
        """The answer to one picture. A caller who gives up leaves the batch, or is not waited for by it."""
        queue = self._accepting(require_name(stream))
        loop = asyncio.get_running_loop()
        case = _Case(picture, loop.create_future(), loop.time())
        queue.cases.append(case)
        if len(queue.cases) >= self.settings.count:
            queue.full.set()
        if queue.task is None:
            queue.task = asyncio.create_task(self._work(stream, queue))
        return await case.answer

    async def close(self) -> None:
        """Refuse what is new, and finish what was accepted."""
        self._closing = True
        for queue in self._queues.values():
            queue.full.set()
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        await asyncio.gather(*tasks)

    def _accepting(self, stream: str) -> _Queue:
        if self._closing:
            raise ClosingError("The service is shutting down. Send this picture again when it is back.")
        queue = self._queues.get(stream, _Queue())
        if len(self) >= self.settings.waiting or len(queue) >= self.settings.per_stream:
            raise OverloadedError("Too many pictures are waiting. Try again in a moment.")
        return self._queues.setdefault(stream, queue)

    async def _work(self, stream: str, queue: _Queue) -> None:
        """Answer a stream's cases, one batch after the other, until none is left."""
        while queue.cases:
            await self._gathered(queue)
            # Whoever gave up meanwhile must not move the others' averages.
            taken = [case for case in queue.cases[: self.settings.count] if not case.answer.done()]
            del queue.cases[: self.settings.count]
            queue.under_way = len(taken)
            if len(queue.cases) < self.settings.count and not self._closing:
                queue.full.clear()
            await self._answered(stream, taken)
            queue.under_way = 0
        del self._queues[stream]

    async def _gathered(self, queue: _Queue) -> None:
        """Wait until enough cases are there, or until the first of them has waited long enough."""
        due = queue.cases[0].since + self.settings.seconds
        with suppress(TimeoutError):
            await asyncio.wait_for(queue.full.wait(), max(0.0, due - asyncio.get_running_loop().time()))

    async def _answered(self, stream: str, cases: Sequence[_Case]) -> None:
        """Give every case its own answer. A batch that is refused is halved until the bad ones stand alone."""
        if not cases:
            return
        try:
            pictures = [case.picture for case in cases]
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._executor, self._answer, stream, pictures)
        except InputError as error:
            if len(cases) == 1:
                _tell(cases[0], error)
                return
            middle = len(cases) // 2
            await self._answered(stream, cases[:middle])
            await self._answered(stream, cases[middle:])
        except Exception as error:
            for case in cases:
                _tell(case, error)
        else:
            for position, case in enumerate(cases):
                if not case.answer.done():
                    case.answer.set_result(answer.of(position))


def _tell(case: _Case, error: Exception) -> None:
    if not case.answer.done():
        case.answer.set_exception(error)
