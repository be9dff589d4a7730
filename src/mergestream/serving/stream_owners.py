"""Streams belong to tokens: who sent the first batch of a stream, and how many streams one token may have."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from mergestream.runtime.files import read_json, write_json
from mergestream.serving.engine.registry import TooManyStreamsError
from mergestream.serving.http.problems import Problem
from mergestream.serving.http.tokens import ADMINISTRATOR, EVERYONE, Holder

SCHEMA_VERSION = 1


class StreamOwners:
    """Names of tokens by stream, in a file. For one event loop.

    A stream without an owner was made without tokens: every client may use it until one sends a batch, which makes it
    the owner.
    """

    def __init__(self, file: Path | None = None, quota: int = 16) -> None:
        self._file, self._quota, self._writing = file, quota, threading.Lock()
        saved = {} if file is None or not file.exists() else read_json(file, SCHEMA_VERSION)
        self._owners: dict[str, str] = dict(saved.get("owners", {}))
        self._senders: Counter[str] = Counter()

    def keep_only(self, streams: Collection[str]) -> None:
        """Forget owners of streams that do not exist: their first batch failed, or they were deleted."""
        self._owners = {stream: name for stream, name in self._owners.items() if stream in streams}

    def reserve(self, stream: str) -> None:
        """Leave a stream to administrators: no token has this name."""
        self._owners[stream] = "(reserved)"

    def allow(self, stream: str, holder: Holder) -> bool:
        return holder.role == ADMINISTRATOR or self._owners.get(stream, holder.name) == holder.name

    def require(self, stream: str, holder: Holder) -> None:
        if not self.allow(stream, holder):
            raise Problem("forbidden", "This stream belongs to another token. Choose another name for yours.")

    @asynccontextmanager
    async def claimed(self, stream: str, holder: Holder, streams: Callable[[], Collection[str]]) -> AsyncIterator[None]:
        """Send a batch in the block: a stream without an owner gets one, unless it is not in `streams` afterwards."""
        self.require(stream, holder)
        claim = stream not in self._owners and holder != EVERYONE
        if claim and holder.role == ADMINISTRATOR:
            claim = stream not in streams()  # an administrator may send to a stream without taking it
        elif claim and list(self._owners.values()).count(holder.name) >= self._quota:
            raise TooManyStreamsError(
                f"A token has at most {self._quota} streams. Use one of them, or have one deleted."
            )
        self._senders[stream] += 1
        try:
            if claim:
                self._owners[stream] = holder.name
                await self._save()
            yield
        finally:
            self._senders[stream] -= 1
            if not self._senders[stream]:
                del self._senders[stream]
                if stream not in streams():
                    self._owners.pop(stream, None)

    async def release(self, stream: str) -> None:
        if self._owners.pop(stream, None) is not None:
            await self._save()

    async def _save(self) -> None:
        if self._file is not None:
            await asyncio.to_thread(self._write, self._file)

    def _write(self, file: Path) -> None:
        with self._writing:
            write_json(file, {"schema_version": SCHEMA_VERSION, "owners": dict(self._owners)})
