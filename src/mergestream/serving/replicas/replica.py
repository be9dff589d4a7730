"""A replica: one of several engines, with its log, in a process of its own."""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.errors import MergestreamError
from mergestream.serving.engine_options import EngineOptions, OpenEngine, open_engine

T = TypeVar("T")


@dataclass(frozen=True)
class PoolSummary:
    """A pool without its weights."""

    names: tuple[str, ...]
    classes: tuple[str, ...]
    cards: tuple[ExpertCard, ...]


@dataclass(frozen=True)
class LineupSummary:
    """A line-up without its weights."""

    pool: PoolSummary
    method: str
    options: Mapping[str, Any]
    off: tuple[str, ...]
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class ReplicaStatus:
    """Status of a replica at a time."""

    at: int  # nanoseconds
    lineup: LineupSummary
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

    def __init__(self, options: EngineOptions, number: int) -> None:
        # All work on a GPU is done by one thread, as in the service.
        self._thread = None if options.device == "cpu" else ThreadPoolExecutor(1, "device")
        self._open: OpenEngine | None = None
        self._error: MergestreamError | None = None
        self._error_reported = False
        try:
            self._open = self._run(partial(open_engine, options.for_replica(number)))
        except MergestreamError as error:  # reported by the first call, since Serve would hide it
            self._error = error

    def call(self, method: str, *arguments: Any, **options: Any) -> Reply:
        """Call a method of the engine, or 'append' of its log."""
        if self._open is None:
            return self._report_error()
        target = self._open.log.append if method == "append" else getattr(self._open.engine, method)
        try:
            value = self._run(partial(target, *arguments, **options))
        except MergestreamError as error:
            return Reply(self._status(self._open), error=error)
        return Reply(self._status(self._open), value)

    def status(self) -> Reply:
        return self._report_error() if self._open is None else Reply(self._status(self._open), os.getpid())

    def check_health(self) -> None:
        """Called by Serve: a replica whose engine could not be opened is restarted once it has reported why."""
        if self._error_reported and self._error is not None:
            raise self._error

    def __del__(self) -> None:
        """Called by Serve before the process ends; the next one needs the locks."""
        opened = getattr(self, "_open", None)
        if opened is not None:
            opened.engine.close()
            opened.log.close()

    def _run(self, work: Callable[[], T]) -> T:
        return work() if self._thread is None else self._thread.submit(work).result()

    def _report_error(self) -> Reply:
        self._error_reported = True
        return Reply(None, error=self._error)

    @staticmethod
    def _status(opened: OpenEngine) -> ReplicaStatus:
        current = opened.engine.lineup
        pool = PoolSummary(current.pool.names, current.pool.classes, current.pool.cards)
        lineup = LineupSummary(pool, current.method, current.options, current.off, current.identity)
        return ReplicaStatus(time.time_ns(), lineup, tuple(opened.engine.streams()), opened.log.failing)
