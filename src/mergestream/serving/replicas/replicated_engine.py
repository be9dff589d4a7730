"""Engines in other processes as one engine: every stream is pinned to one replica by its name.

`ReplicatedEngine` takes the place of a local engine, so the HTTP service in front is the same. The replicas are one
process on this machine (`EngineProcess`), or several behind Ray Serve, in front of which several services may stand.
"""

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from mergestream.data.intake.pictures import Picture
from mergestream.runtime.errors import MergestreamError, WorkerError
from mergestream.serving.answer_queue import OverloadedError
from mergestream.serving.audit.line_kinds import STOPPED
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.engine.answers import Answer
from mergestream.serving.engine.persistence import LoggedAnswer
from mergestream.serving.engine.registry import require_name
from mergestream.serving.replicas.replica import Handle, ReplicaGone, ReplicaStatus

POLL_SECONDS, GONE_SECONDS = 2.0, 10.0
GONE = "The engine does not answer and is being restarted. The step may be in its log."
TRY_AGAIN = f"{GONE} Send this again in a moment."
log = logging.getLogger(__name__)


class ReplicatedEngine:
    """Engine and log in one. Calls about a stream go to its replica, other calls to all of them.

    `describe`, `streams` and `failing` never wait: they come from the last status of each replica, which every call and
    a polling thread renew.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        *,
        silence: float = GONE_SECONDS,
        on_append: Callable[[bool], None] = lambda _: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`silence`: seconds after which a replica counts as gone. `on_append` hears of each line: written or not."""
        self._silence = silence
        self._handles, self._on_append, self._on_close = tuple(handles), on_append, on_close
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
        pool = self._statuses[0].pool
        assert pool is not None  # the first status is a whole one
        return pool

    def history(self) -> list[LoggedAnswer]:
        return [each for number in range(len(self._handles)) for each in self._result(number, "history")]

    def streams(self) -> list[dict[str, Any]]:
        streams = [stream for status in self._statuses.values() for _, stream in status.streams.values()]
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
        return [self._result(number, "status") for number in range(len(self._handles))]

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
            value = self._result(number, *arguments, **options)
        except AuditError:
            self._on_append(False)
            raise
        self._on_append(True)
        return value

    def _is_gone(self, number: int) -> bool:
        """Whether it died during a call or has not replied for a while: Serve then holds calls back."""
        return time.monotonic() - self._replied_at[number] >= self._silence

    def _call_all(self, *arguments: Any, **options: Any) -> list[Any]:
        return [self._call(number, *arguments, **options) for number in range(len(self._handles))]

    def _result(self, number: int, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a replica. Raise its own error, or OverloadedError if it is gone."""
        called_at = time.monotonic()
        try:
            reply = self._handles[number].call(method, *arguments, **options)
        except ReplicaGone as error:
            raise self._gone(number, error, called_at) from error
        if reply.error is not None and reply.status is None:  # its engine could not be opened
            raise self._gone(number, reply.error, called_at) if number in self._statuses else reply.error
        if reply.status is not None:
            self._store_status(number, reply.status)
        if reply.error is not None:
            raise reply.error
        return reply.value

    def _gone(self, number: int, error: Exception, called_at: float) -> MergestreamError:
        if number not in self._statuses:
            return WorkerError("The engine's process ended while it was started.")
        with self._status_lock:
            if self._replied_at.get(number, called_at) < called_at:  # otherwise it has already come back
                self._replied_at[number] = -math.inf
        log.error("engine %d does not answer: %s", number, type(error).__name__)
        return OverloadedError(TRY_AGAIN)

    def _store_status(self, number: int, status: ReplicaStatus) -> None:
        with self._status_lock:
            self._replied_at[number] = time.monotonic()
            before = self._statuses.get(number)
            self._statuses[number] = status if before is None else status.after(before)

    def _poll(self, number: int) -> None:
        while not self._closed.wait(POLL_SECONDS):
            try:
                self._result(number, "status")
            except OverloadedError:
                continue  # logged already
            except Exception as error:
                if not self._closed.is_set():
                    log.error("the status of engine %d cannot be read: %s", number, type(error).__name__)


def place_of(stream: str, replicas: int) -> int:
    """Rendezvous hashing: a new replica takes its share of the streams, and no other stream moves."""
    return max(range(replicas), key=lambda number: hashlib.sha256(f"{number}/{stream}".encode()).digest())
