"""The queue in front of the engine: streams take turns, and single images of a stream are answered together.

A stream has at most one group in progress, in order of arrival; then it is the next stream's turn. So a busy stream
delays another one by one group. Work that would have to wait too long is refused at once.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from mergestream.data.intake.pictures import Picture
from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.option_checks import number, whole_number
from mergestream.serving.engine.answers import Answer
from mergestream.serving.engine.registry import require_name

MOST_ALONE = 8  # images per turn that are answered one by one and logged together
ENOUGH = 8  # single images of a group that starts early because the engine has just become idle
GROUPS_MEASURED = 32  # the last ones, for the throughput


class OverloadedError(MergestreamError):
    """Too much work is waiting; the caller may try again after this many seconds."""

    def __init__(self, message: str, retry_after: int = 2) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClosingError(MergestreamError):
    """The service is shutting down: it finishes accepted work and refuses new work."""


@dataclass(frozen=True)
class QueueSettings:
    """Groups of images, and limits of what may wait."""

    single: bool | None = None  # whether each image is answered by itself; None: those of /images, not of a batch
    count: int = 32  # largest group of single images
    seconds: float = 0.05  # how long the first image of a group waits; images answered by themselves do not
    waiting: int = 1024  # images of all streams that may wait or be in progress
    per_stream: int = 512  # the same per stream, so that a busy scanner leaves room for the others
    longest_wait: float = 5.0  # seconds; an image that would wait longer, by the recent throughput, is refused

    def __post_init__(self) -> None:
        for limit in ("count", "waiting", "per_stream"):
            whole_number(limit, getattr(self, limit), low=1)
        number("seconds", self.seconds, low=0)
        number("longest_wait", self.longest_wait, above=0)


@dataclass(frozen=True)
class _Job:
    pictures: Sequence[Picture]
    single: bool  # each image is answered by itself
    joins: bool  # may share a group with its neighbours in the queue
    due: float  # by the event loop's clock: not started earlier, unless the group is full
    answer: asyncio.Future[Answer]


class AnswerQueue:
    """For one event loop. `answer(stream, pictures, single)` runs in `threads` (None: the loop's own)."""

    def __init__(
        self,
        answer: Callable[[str, Sequence[Picture], bool], Answer],
        settings: QueueSettings | None = None,
        threads: Executor | None = None,
        workers: int = 4,
    ) -> None:
        self._answer, self._threads, self._workers = answer, threads, workers
        self.settings = settings or QueueSettings()
        self._waiting: dict[str, deque[_Job]] = {}  # in the order of their turns
        self._in_progress: dict[str, asyncio.Task[None]] = {}
        self._pictures: Counter[str] = Counter()
        self._recent: deque[tuple[float, int]] = deque(maxlen=GROUPS_MEASURED)  # seconds, images
        self._last_done, self._closing = -math.inf, False

    def __len__(self) -> int:
        """Images that wait or are in progress."""
        return self._pictures.total()

    async def answer(
        self, stream: str, pictures: Sequence[Picture], *, single: bool = False, one: bool = False
    ) -> Answer:
        """Answer a batch, each image by itself if `single`; or `one` image, which may share a group with others.

        A caller may give up: its images are left out if their group has not started.
        """
        single = single or (self.settings.single is not False if one else bool(self.settings.single))
        with self.counted(stream, len(pictures)):
            loop = asyncio.get_running_loop()
            due = loop.time() + (self.settings.seconds if one and not single else 0.0)
            job = _Job(pictures, single, one, due, loop.create_future())
            self._waiting.setdefault(stream, deque()).append(job)
            self._start()
            if due > loop.time():
                loop.call_at(due + 0.001, self._start)  # timers may be early by the clock's resolution
            return await job.answer

    @contextmanager
    def counted(self, stream: str, pictures: int) -> Iterator[None]:
        """Count images as waiting inside the block; refuse them if the queue is full or too slow."""
        self._require_room(require_name(stream))
        self._pictures[stream] += pictures
        try:
            yield
        finally:
            self._pictures[stream] -= pictures
            self._pictures += Counter()  # forget streams without images

    async def close(self) -> None:
        """Refuse new images and finish accepted ones."""
        self._closing = True
        self._start()
        while self._in_progress:
            await asyncio.wait(self._in_progress.values())

    def _require_room(self, stream: str) -> None:
        if self._closing:
            raise ClosingError("The service is shutting down. Send this again when it is back.")
        own = self._pictures[stream]
        if len(self) >= self.settings.waiting or own >= self.settings.per_stream:
            raise OverloadedError("Too many images are waiting. Try again in a moment.")
        # Until it is this stream's turn for the last time, every other stream has had as many turns and one more.
        others = (min(count, own + self.settings.count) for name, count in self._pictures.items() if name != stream)
        wait = (own + sum(others)) * self._seconds_per_picture()
        if wait > self.settings.longest_wait:
            retry_after = math.ceil(wait - self.settings.longest_wait)
            raise OverloadedError(f"An answer would take about {wait:.0f} s: too much work is waiting.", retry_after)

    def _seconds_per_picture(self) -> float:
        """By the last groups without the slowest, which may have been the first of all; 0 before the second."""
        counted = sorted(self._recent)[:-1]
        return sum(seconds for seconds, _ in counted) / max(1, sum(pictures for _, pictures in counted))

    def _start(self) -> None:
        """Start what may start: one group per stream, the stream that has waited for its turn longest first."""
        now = asyncio.get_running_loop().time()
        for stream in list(self._waiting):
            if len(self._in_progress) >= self._workers:
                return
            jobs = self._waiting[stream]
            while jobs and jobs[0].answer.done():  # images of callers who gave up must not change the averages
                jobs.popleft()
            if stream in self._in_progress or (jobs and not self._is_ready(jobs, now)):
                continue
            del self._waiting[stream]
            if jobs:
                self._in_progress[stream] = asyncio.create_task(self._work(stream, self._group(jobs)))
            if jobs:  # back to the end of the round
                self._waiting[stream] = jobs

    def _is_ready(self, jobs: deque[_Job], now: float) -> bool:
        # Between two groups under load the engine would be idle while a group waits to be full.
        pause = not self._in_progress and now < self._last_done + self.settings.seconds
        enough = min(ENOUGH, self.settings.count) if pause else self.settings.count
        return jobs[0].due <= now or self._closing or sum(job.joins for job in jobs) >= enough

    def _group(self, jobs: deque[_Job]) -> list[_Job]:
        """Take the first job, and with a single image those behind it."""
        group = [jobs.popleft()]
        most = min(self.settings.count, MOST_ALONE) if group[0].single else self.settings.count
        while jobs and jobs[0].joins and group[0].joins and len(group) < most:
            group.append(jobs.popleft())
        return [job for job in group if not job.answer.done()]

    async def _work(self, stream: str, group: list[_Job]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            await self._answer_group(stream, group)
        finally:
            pictures = sum(len(job.pictures) for job in group)
            self._recent.append((loop.time() - max(started, self._last_done), pictures))
            self._last_done = loop.time()
            del self._in_progress[stream]
            self._start()

    async def _answer_group(self, stream: str, group: list[_Job]) -> None:
        """Answer each job. A refused group is halved until the bad images are alone."""
        pictures = [picture for job in group for picture in job.pictures]
        work = partial(self._answer, stream, pictures, group[0].single)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except Exception as error:
            if isinstance(error, InputError) and len(group) > 1:
                middle = len(group) // 2
                await self._answer_group(stream, group[:middle])
                await self._answer_group(stream, group[middle:])
                return
            for job in group:
                if not job.answer.done():
                    job.answer.set_exception(error)
        else:
            for position, job in enumerate(group):
                if not job.answer.done():
                    job.answer.set_result(answer.of(position) if job.joins else answer)
