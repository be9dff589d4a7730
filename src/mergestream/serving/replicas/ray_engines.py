"""Scale-out: engines behind Ray Serve as one engine, every stream pinned to one of them by its name.

`PinnedEngines` stands where a local engine would stand, so the HTTP service in front, with its tokens, limits and
micro-batches, stays as it is; any number of them may run.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mergestream.data.intake.pictures import Picture
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.engine.answers import Answer
from mergestream.serving.engine.registry import require_name
from mergestream.serving.micro_batching import OverloadedError
from mergestream.serving.replicas.replica import ShownLineup, Told, View
from mergestream.serving.service import STOPPED

RENEWED_SECONDS, GONE_SECONDS = 2.0, 10.0
GONE = "An engine does not answer; it is being started again, and what it was doing may be in its log."
TRY_AGAIN = f"{GONE} Send this again in a moment."
log = logging.getLogger(__name__)


class PinnedEngines:
    """An engine, and its log, to whoever asks: what is about a stream goes to the engine it is pinned to, the rest to
    all. What an event loop asks for is answered from the last views, which are renewed by every call and now and then.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        seconds: float = 600.0,
        *,
        count: Callable[[bool], None] = lambda _: None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """`seconds` an engine may take for an answer; `count` is told of every line that was written or was not;
        `leave` is called in the end, once."""
        self._handles, self._seconds, self._count, self._leave = tuple(handles), seconds, count, leave
        self._views: dict[int, View] = {}
        self._heard: dict[int, float] = {}
        self._renewing, self._closed = threading.Lock(), threading.Event()
        self.processes()
        numbers = range(len(self._handles))
        # One an engine: who waits for one that is gone must not keep the others' views from being renewed.
        self._renewers = [threading.Thread(target=self._renew, args=(n,), name="view", daemon=True) for n in numbers]
        for renewer in self._renewers:
            renewer.start()

    def place(self, stream: str) -> int:
        """The number of the engine that a stream is pinned to."""
        return place_of(require_name(stream), len(self._handles))

    @property
    def lineup(self) -> ShownLineup:
        return self._views[0].lineup

    def streams(self) -> list[dict[str, Any]]:
        found = [stream for view in self._views.values() for stream in view.streams]
        return sorted(found, key=lambda stream: str(stream["stream"]))

    @property
    def failing(self) -> str | None:
        """Why one of the logs cannot be written."""
        found = (GONE if self._is_gone(number) else self._views[number].failing for number in self._views)
        return next((why for why in found if why is not None), None)

    def answer(self, stream: str, pictures: Sequence[Picture]) -> Answer:
        """Which DICOM object a picture came from stays here: engines know pictures by their hashes."""
        bare = [replace(picture, source=None) for picture in pictures]
        answer: Answer = self._call(self.place(stream), "answer", stream, bare)
        return answer

    def reset(self, stream: str) -> None:
        self._call(self.place(stream), "reset", stream)

    def delete(self, stream: str) -> None:
        self._call(self.place(stream), "delete", stream)

    def switch(self, expert: str, *, on: bool) -> tuple[str, ...]:
        """One engine after the other: what the first refuses changes none."""
        off: tuple[str, ...] = self._call_all("switch", expert, on=on)[-1]
        return off

    def reload(self) -> dict[str, Any]:
        told = self._call_all("reload")
        return {**told[-1], "restarted": sorted(name for each in told for name in each["restarted"])}

    def append(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """An event of the whole service: a line in every log, or in none where an engine is gone. Its end is for all
        that are left."""
        gone = [number for number in self._views if self._is_gone(number)]
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
        """The engines' process numbers, each on its own machine."""
        return [self._look(number) for number in range(len(self._handles))]

    def close(self) -> None:
        """On a cluster that somebody else began the engines go on: others may stand in front of them too."""
        if not self._closed.is_set():
            self._closed.set()
            for renewer in self._renewers:
                renewer.join(RENEWED_SECONDS)
            self._leave()

    def _call(self, number: int, *arguments: Any, **options: Any) -> Any:
        """Whatever is called writes one line to the engine's log, or is refused. Nobody waits for an engine that is
        gone: who does would keep a thread from the others."""
        if self._is_gone(number):
            raise OverloadedError(TRY_AGAIN)
        try:
            value = self._told(number, self._handles[number].call.remote(*arguments, **options))
        except AuditError:
            self._count(False)
            raise
        self._count(True)
        return value

    def _look(self, number: int) -> int:
        process: int = self._told(number, self._handles[number].look.remote())
        return process

    def _is_gone(self, number: int) -> bool:
        """It died under a call, or has said nothing for a while: Serve holds calls back until it is there again."""
        silent = time.monotonic() - self._heard[number] > GONE_SECONDS
        return silent or self._views[number].failing == GONE

    def _call_all(self, *arguments: Any, **options: Any) -> list[Any]:
        return [self._call(number, *arguments, **options) for number in range(len(self._handles))]

    def _told(self, number: int, response: Any) -> Any:
        """An engine's refusal as itself; an engine that is gone as a reason to try again."""
        import ray

        asked = time.monotonic()
        try:
            told: Told = response.result(timeout_s=self._seconds)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise self._gone(number, error, asked) from error
        if told.refusal is not None and told.view is None:  # it could not be opened
            raise self._gone(number, told.refusal, asked) if number in self._views else told.refusal
        if told.view is not None:
            self._keep(number, told.view)
        if told.refusal is not None:
            raise told.refusal
        return told.value

    def _gone(self, number: int, error: Exception, asked: float) -> OverloadedError:
        with self._renewing:
            if self._heard.get(number, asked) < asked:  # else it is back already, and this call was of before
                self._views[number] = replace(self._views[number], failing=GONE)
        log.error("engine %d does not answer: %s", number, type(error).__name__)
        return OverloadedError(TRY_AGAIN)

    def _keep(self, number: int, view: View) -> None:
        with self._renewing:
            self._heard[number] = time.monotonic()
            if number not in self._views or self._views[number].at < view.at:
                self._views[number] = view

    def _renew(self, number: int) -> None:
        while not self._closed.wait(RENEWED_SECONDS):
            try:
                self._look(number)
            except OverloadedError:
                continue  # told by who was kept from an answer
            except Exception as error:
                if not self._closed.is_set():
                    log.error("engine %d cannot be looked at: %s", number, type(error).__name__)


def place_of(stream: str, engines: int) -> int:
    """Rendezvous hashing: of n + 1 engines the new one takes 1/(n + 1) of the streams, and no other stream moves."""
    return max(range(engines), key=lambda number: hashlib.sha256(f"{number}/{stream}".encode()).digest())
