"""The streams of a service: one per site or scanner, each with its own lock and state."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mergestream.runtime.errors import InputError, MergestreamError, UnknownNameError
from mergestream.serving.engine.stream_state import StreamState
from mergestream.serving.guards.findings import Alarm
from mergestream.serving.http.schemas import StreamQuality
from mergestream.serving.quality.step_sums import Window

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class TooManyStreamsError(MergestreamError):
    """More streams than the service was set up for."""


@dataclass
class ServedStream:
    """One stream, for the thread that holds its lock. `state` is replaced, never changed; None at the start."""

    name: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    steps: int = 0
    images: int = 0
    state: StreamState | None = None
    deleted: bool = False
    line: dict[str, Any] | None = None  # number and hash of the log's line that its state is of
    restarted: str | None = None  # why its averages started anew, until an answer has reported it
    window: Window = ()  # sums over its last answers
    quality: StreamQuality | None = None  # estimates from them
    alarms: tuple[Alarm, ...] | None = None  # None: unknown, before the first step of this process

    def describe(self) -> dict[str, Any]:
        return {
            "stream": self.name,
            "steps": self.steps,
            "images": self.images,
            "alarms": self.alarms,
            "quality": self.quality,
        }


def require_name(name: str) -> str:
    """Refuse a name that cannot be a file's name. The message does not repeat it: it may hold anything."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            "A stream's name has 1 to 64 small letters, digits, '-' and '_', and begins with a letter or digit. "
            "Name the site or the scanner, never a patient."
        )
    return name


class Registry:
    """The streams by name. A stream whose first batch failed is not kept."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._streams: dict[str, ServedStream] = {}

    def add(self, stream: ServedStream) -> None:
        with self._lock:
            self._streams[stream.name] = stream

    @contextmanager
    def held(self, name: str, *, create: bool = False) -> Iterator[ServedStream]:
        """Hold a stream for this thread alone inside the block."""
        require_name(name)
        while True:
            stream = self._get(name, create)
            with stream.lock:
                if stream.deleted or (stream.steps == 0 and not create):  # its last holder failed or deleted it
                    self.remove(stream)
                    continue
                try:
                    yield stream
                finally:
                    if stream.steps == 0 and not stream.deleted:
                        self.remove(stream)
                return

    def all(self) -> list[ServedStream]:
        with self._lock:
            return [self._streams[name] for name in sorted(self._streams) if self._streams[name].steps]

    def _get(self, name: str, create: bool) -> ServedStream:
        with self._lock:
            stream = self._streams.get(name)
            if stream is None and not create:
                raise UnknownNameError("There is no such stream; the first batch sent to one creates it.")
            if stream is None:
                if len(self._streams) >= self._most:
                    raise TooManyStreamsError(
                        f"This service keeps {self._most} streams at most. Delete one, or start it with more."
                    )
                stream = self._streams[name] = ServedStream(name)
            return stream

    def remove(self, stream: ServedStream) -> None:
        """Remove a stream that this thread holds."""
        with self._lock:
            stream.deleted = True
            if self._streams.get(stream.name) is stream:
                del self._streams[stream.name]
