"""Limits of requests: rate per client, size and time of a body, memory of all requests together."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import Receive

from mergestream.data.intake.limits import MEBIBYTE, Limits
from mergestream.serving.answer_queue import OverloadedError, QueueSettings
from mergestream.serving.http.problems import ClientGone, Problem

MOST_KEYS = 4096  # tokens or addresses with a bucket


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of requests, files and the queue."""

    body_bytes: int = 256 * MEBIBYTE  # of one request
    body_seconds: float = 60.0  # time limit for a body
    answer_seconds: float = 120.0  # time limit for an answer
    held_bytes: int = 2048 * MEBIBYTE  # bodies and decoded images of all requests together
    requests: int = 1024  # in progress at a time
    rate: float = 100.0  # requests per second and token (or address) in the long run; 0: no limit
    burst: int = 200  # requests at once
    intake: Limits = field(default_factory=Limits)
    queue: QueueSettings = field(default_factory=QueueSettings)


class RateLimiter:
    """A token bucket per client. The one that has been idle longest is forgotten first."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, float(burst), clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def admit(self, key: str) -> None:
        if self._rate == 0:
            return
        now = self._clock()
        left, then = self._buckets.pop(key, (self._burst, now))
        left = min(self._burst, left + (now - then) * self._rate)
        admitted = left >= 1
        self._buckets[key] = (left - 1 if admitted else left, now)
        if len(self._buckets) > MOST_KEYS:
            self._buckets.popitem(last=False)
        if not admitted:
            wait = max(1, round((1 - left) / self._rate + 0.5))
            detail = f"This service takes {self._rate:g} requests per second from each client. Wait a moment."
            raise Problem("rate_limited", detail, {"Retry-After": str(wait)})


class HeldBytes:
    """Memory of all requests together. For one event loop."""

    def __init__(self, most: int) -> None:
        self._most, self.total = most, 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """One request's part of it: a function that takes bytes, all released at the end of the block."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if self.total + count > self._most:
                raise OverloadedError("The service's memory for images is full. Try again in a moment.")
            self.total += count
            taken += count

        try:
            yield take
        finally:
            self.total -= taken


async def body_of(receive: Receive, most: int, seconds: float) -> AsyncIterator[bytes]:
    """Yield a body in chunks and count its bytes, whatever length was announced."""
    size, deadline = 0, asyncio.get_running_loop().time() + seconds
    more = True
    while more:
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise Problem("body_too_slow", f"A body must arrive within {seconds:g} s.") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > most:
            raise Problem("body_too_large", f"A body may have at most {most:,} bytes.")
        yield chunk
