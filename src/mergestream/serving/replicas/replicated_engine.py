"""Replicas behind Ray Serve as one engine: every stream is pinned to one replica by its name.

`ReplicatedEngine` takes the place of a local engine, so the HTTP service in front is the same; several services may
stand in front of the same replicas.
"""

import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeVar

from mergestream.data.intake.pictures import Picture
from mergestream.runtime.errors import MergestreamError
from mergestream.serving.answer_queue import OverloadedError
from mergestream.serving.audit.line_kinds import STOPPED
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.engine.answers import Answer
from mergestream.serving.engine.engine import Engine
from mergestream.serving.engine.persistence import LoggedAnswer
from mergestream.serving.engine.registry import require_name
from mergestream.serving.open_engine import open_engine
from mergestream.serving.options import ServeOptions

POLL_SECONDS, GONE_SECONDS = 2.0, 10.0
GONE = "A replica does not answer and is being restarted. The step may be in its log."
TRY_AGAIN = f"{GONE} Send this again in a moment."
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class ReplicaStatus:
    """Status of a replica at a time."""

    at: int  # nanoseconds
    pool: dict[str, Any]  # as the engine describes it
    streams: tuple[dict[str, Any], ...]
    failing: str | None  # why its log cannot be written, or None


@dataclass(frozen=True)
class Reply:
    """Reply of a replica to a call: a value or an error, and its status (None if its engine could not be opened)."""

    status: ReplicaStatus | None
    value: Any = None
    error: MergestreamError | None = None


class Replica:
    """One engine with its log, in a process of Ray Serve."""

    def __init__(self, options: ServeOptions, number: int) -> None:
        # All work on a GPU is done by one thread, as in the service.
        self._thread = None if options.device == "cpu" else ThreadPoolExecutor(1, "device")
        self._engine: Engine | None = None
        self._error: MergestreamError | None = None
        self._error_reported = False
        try:
            self._engine = self._run(partial(open_engine, options.for_replica(number)))
        except MergestreamError as error:  # reported by the first call, since Serve would hide it
            self._error = error

    def call(self, method: str, *arguments: Any, **options: Any) -> Reply:
        """Call a method of the engine, or 'append' of its log."""
        if self._engine is None:
            return self._reply()
        target = self._engine.audit.append if method == "append" else getattr(self._engine, method)
        try:
            return self._reply(self._run(partial(target, *arguments, **options)))
        except MergestreamError as error:
            return self._reply(error=error)

    def status(self) -> Reply:
        return self._reply(os.getpid())

    def check_health(self) -> None:
        """Called by Serve: a replica whose engine could not be opened is restarted once it has reported why."""
        if self._error_reported and self._error is not None:
            raise self._error

    def __del__(self) -> None:
        """Called by Serve before the process ends; the next one needs the locks."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()

    def _run(self, work: Callable[[], T]) -> T:
        return work() if self._thread is None else self._thread.submit(work).result()

    def _reply(self, value: Any = None, error: MergestreamError | None = None) -> Reply:
        if self._engine is None:
            self._error_reported = True
            return Reply(None, error=self._error)
        described, streams = self._engine.describe(), tuple(self._engine.streams())
        status = ReplicaStatus(time.time_ns(), described, streams, self._engine.audit.failing)
        return Reply(status, value, error)


class ReplicatedEngine:
    """Engine and log in one. Calls about a stream go to its replica, other calls to all of them.

    `describe`, `streams` and `failing` never wait: they come from the last status of each replica, which every call and
    a polling thread renew.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        seconds: float = 600.0,
        *,
        on_append: Callable[[bool], None] = lambda _: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`seconds`: time limit of a call. `on_append` hears of each audit line: written or not."""
        self._handles, self._seconds, self._on_append, self._on_close = tuple(handles), seconds, on_append, on_close
        self._statuses: dict[int, ReplicaStatus] = {}
        self._replied_at: dict[int, float] = {}
        self._status_lock, self._closed = threading.Lock(), threading.Event()
        self.processes()
        numbers = range(len(self._handles))
        # One thread per replica: waiting for one that is gone must not delay the others.
        self._pollers = [threading.Thread(target=self._poll, args=(n,), name="status", daemon=True) for n in numbers]
        for poller in self._pollers:
            poller.start()

    def place(self, stream: str) -> int:
        """The number of the replica that a stream is pinned to."""
        return place_of(require_name(stream), len(self._handles))

    @property
    def audit(self) -> Self:
        return self

    def describe(self) -> dict[str, Any]:
        return self._statuses[0].pool

    def history(self) -> list[LoggedAnswer]:
        calls = [(number, handle.call.remote("history")) for number, handle in enumerate(self._handles)]
        return [each for number, call in calls for each in self._result(number, call)]

    def streams(self) -> list[dict[str, Any]]:
        streams = [stream for status in self._statuses.values() for stream in status.streams]
        return sorted(streams, key=lambda stream: str(stream["stream"]))

    @property
    def failing(self) -> str | None:
        """Why one of the logs cannot be written, or None."""
        reasons = (GONE if self._is_gone(number) else status.failing for number, status in self._statuses.items())
        return next((reason for reason in reasons if reason is not None), None)

    def answer(self, stream: str, pictures: Sequence[Picture], *, single: bool = False) -> Answer:
        """Images are sent without the identifiers of their DICOM objects."""
        bare = [replace(picture, source=None) for picture in pictures]
        answer: Answer = self._call(self.place(stream), "answer", stream, bare, single=single)
        for _ in answer.steps[1:]:  # each has a line of its own
            self._on_append(True)
        return answer

    def reset(self, stream: str) -> None:
        self._call(self.place(stream), "reset", stream)

    def acknowledge(self, stream: str, *, name: str, note: str, by: str) -> None:
        self._call(self.place(stream), "acknowledge", stream, name=name, note=note, by=by)

    def delete(self, stream: str) -> None:
        self._call(self.place(stream), "delete", stream)

    def switch(self, expert: str, *, on: bool) -> tuple[str, ...]:
        """One replica after the other: if the first refuses, none changes."""
        off: tuple[str, ...] = self._call_all("switch", expert, on=on)[-1]
        return off

    def reload(self) -> dict[str, Any]:
        reloads = self._call_all("reload")
        return {**reloads[-1], "restarted": sorted(name for each in reloads for name in each["restarted"])}

    def append(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write a line to every log, or to none if a replica is gone. The end is logged by all that are left."""
        gone = [number for number in self._statuses if self._is_gone(number)]
        lines = [
            self._call(number, "append", kind, dict(body))
            for number in range(len(self._handles))
            if number not in gone and (kind == STOPPED or not gone)
        ]
        if gone:
            raise OverloadedError(TRY_AGAIN)
        line: dict[str, Any] = lines[-1]
        return line

    def processes(self) -> list[int]:
        """Process ids of the replicas, each on its own machine."""
        return [self._fetch_status(number) for number in range(len(self._handles))]

    def close(self) -> None:
        """Close the connection. Replicas on a shared cluster stay: other services may use them."""
        if not self._closed.is_set():
            self._closed.set()
            for poller in self._pollers:
                poller.join(POLL_SECONDS)
            self._on_close()

    def _call(self, number: int, *arguments: Any, **options: Any) -> Any:
        """Call a replica; every call writes one line to its log. A replica that is gone is not waited for."""
        if self._is_gone(number):
            raise OverloadedError(TRY_AGAIN)
        try:
            value = self._result(number, self._handles[number].call.remote(*arguments, **options))
        except AuditError:
            self._on_append(False)
            raise
        self._on_append(True)
        return value

    def _fetch_status(self, number: int) -> int:
        process: int = self._result(number, self._handles[number].status.remote())
        return process

    def _is_gone(self, number: int) -> bool:
        """Whether it died during a call or has not replied for a while: Serve then holds calls back."""
        return time.monotonic() - self._replied_at[number] > GONE_SECONDS

    def _call_all(self, *arguments: Any, **options: Any) -> list[Any]:
        return [self._call(number, *arguments, **options) for number in range(len(self._handles))]

    def _result(self, number: int, response: Any) -> Any:
        """Wait for a reply. Raise the replica's own error, or OverloadedError if the replica is gone."""
        import ray

        called_at = time.monotonic()
        try:
            reply: Reply = response.result(timeout_s=self._seconds)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise self._gone(number, error, called_at) from error
        if reply.error is not None and reply.status is None:  # its engine could not be opened
            raise self._gone(number, reply.error, called_at) if number in self._statuses else reply.error
        if reply.status is not None:
            self._store_status(number, reply.status)
        if reply.error is not None:
            raise reply.error
        return reply.value

    def _gone(self, number: int, error: Exception, called_at: float) -> OverloadedError:
        with self._status_lock:
            if self._replied_at.get(number, called_at) < called_at:  # otherwise it has already come back
                self._replied_at[number] = -math.inf
        log.error("replica %d does not answer: %s", number, type(error).__name__)
        return OverloadedError(TRY_AGAIN)

    def _store_status(self, number: int, status: ReplicaStatus) -> None:
        with self._status_lock:
            self._replied_at[number] = time.monotonic()
            if number not in self._statuses or self._statuses[number].at < status.at:
                self._statuses[number] = status

    def _poll(self, number: int) -> None:
        while not self._closed.wait(POLL_SECONDS):
            try:
                self._fetch_status(number)
            except OverloadedError:
                continue  # logged already
            except Exception as error:
                if not self._closed.is_set():
                    log.error("the status of replica %d cannot be read: %s", number, type(error).__name__)


def place_of(stream: str, replicas: int) -> int:
    """Rendezvous hashing: a new replica takes its share of the streams, and no other stream moves."""
    return max(range(replicas), key=lambda number: hashlib.sha256(f"{number}/{stream}".encode()).digest())
