"""One engine with its log in a process of its own, and what it replies to the process of the service."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from mergestream.runtime.errors import MergestreamError
from mergestream.serving.engine.engine import Engine
from mergestream.serving.open_engine import open_engine
from mergestream.serving.options import ServeOptions
from mergestream.serving.tracing import start_tracing

T = TypeVar("T")


@dataclass(frozen=True)
class ReplicaStatus:
    """Status of a replica at a time; after an answer only of its stream, since nothing else has changed."""

    at: int  # nanoseconds
    pool: dict[str, Any] | None  # as the engine describes it; None after an answer
    streams: dict[str, tuple[int, dict[str, Any]]]  # by name: the time, and the stream's status then
    failing: str | None  # why its log cannot be written, or None

    def after(self, before: "ReplicaStatus") -> "ReplicaStatus":
        """The newest of both in every part: replies may arrive in any order."""
        whole, part = (before, self) if self.pool is None or self.at < before.at else (self, before)
        times = {name: at for name, (at, _) in whole.streams.items()}
        newer = {name: each for name, each in part.streams.items() if each[0] > max(whole.at, times.get(name, 0))}
        latest = max(self, before, key=lambda status: status.at)
        return replace(whole, streams={**whole.streams, **newer}, failing=latest.failing)


@dataclass(frozen=True)
class Reply:
    """Reply of a replica to a call: a value or an error, and its status (None if its engine could not be opened)."""

    status: ReplicaStatus | None
    value: Any = None
    error: MergestreamError | None = None


class ReplicaGone(Exception):  # noqa: N818
    """A replica that does not reply: it ended, or cannot be reached."""


class Handle(Protocol):
    """How to reach a replica."""

    def call(self, method: str, *arguments: Any, **options: Any) -> Reply:
        """`Replica.call` there; ReplicaGone if it does not reply."""


class Replica:
    """One engine with its log, in a process of its own; `number`: its place among several, or None."""

    def __init__(self, options: ServeOptions, number: int | None) -> None:
        # One thread loads the pool and computes. On a CPU any other thread that computes has OpenMP threads of its own,
        # and when those are more than cores they sleep between two operations: a step takes twice as long.
        self._on_gpu = options.device != "cpu"
        several = self._on_gpu or torch.get_num_threads() > 1
        self._thread = ThreadPoolExecutor(1, "compute") if several else None
        self._engine: Engine | None = None
        self._error: MergestreamError | None = None
        self._error_reported = False
        self._described: dict[str, Any] | None = None  # the pool, as it was at the last reply
        self._stop_tracing = (lambda: None) if options.otlp is None else start_tracing(options.otlp)
        try:
            own = options if number is None else options.for_replica(number)
            self._engine = self._run(partial(open_engine, own))
        except MergestreamError as error:  # reported by the first call, since Serve would hide it
            self._error = error

    def call(self, method: str, *arguments: Any, **options: Any) -> Reply:
        """Call a method of the engine, or 'append' of its log; 'status': the process id."""
        if self._engine is None:
            self._error_reported = True
            return Reply(None, error=self._error)
        if method == "status":
            return Reply(self._status(), os.getpid())
        target = self._engine.audit.append if method == "append" else getattr(self._engine, method)
        of_stream = arguments[0] if method == "answer" else None
        try:
            value = self._run(partial(target, *arguments, **options), aside=method != "answer")
        except MergestreamError as error:
            return Reply(self._status(of_stream), error=error)
        return Reply(self._status(of_stream), value)

    def check_health(self) -> None:
        """Called by Serve: a replica whose engine could not be opened is restarted once it has reported why."""
        if self._error_reported and self._error is not None:
            raise self._error

    def close(self) -> None:
        """Save and release everything; the next process needs the locks."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            self._run(engine.close)
            self._engine = None
            self._stop_tracing()

    def __del__(self) -> None:
        """Called by Serve before the process ends."""
        self.close()

    def _run(self, work: Callable[[], T], *, aside: bool = False) -> T:
        """`aside`: on a CPU not behind a step, but in a thread of its own, whose OpenMP threads end with it."""
        if self._thread is None:
            return work()
        if self._on_gpu or not aside:
            return self._thread.submit(work).result()
        with ThreadPoolExecutor(1) as own:
            return own.submit(work).result()

    def _status(self, stream: str | None = None) -> ReplicaStatus:
        """The status of everything, or of one stream if the pool is as it was."""
        assert self._engine is not None
        at, described = time.time_ns(), self._engine.describe()
        stream, self._described = stream if described == self._described else None, described
        pool = described if stream is None else None
        streams = {each["stream"]: (at, each) for each in self._engine.streams() if stream in (None, each["stream"])}
        return ReplicaStatus(at, pool, streams, self._engine.audit.failing)
