"""The queue in front of the decoders: of each stream few requests at a time, and its small files that wait together."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

from mergestream.data.intake.decoder_pool import PLACES
from mergestream.data.intake.input_files import read_each, read_uploads
from mergestream.data.intake.limits import Limits
from mergestream.data.intake.pictures import Picture

SMALL_BYTES, MOST_TOGETHER = 1 << 14, 16  # of a file that may wait for others, and how many of them
Group = list[tuple[bytes, asyncio.Future[list[Picture]]]]


class DecodeQueue:
    """For one event loop. Streams do not wait for each other: files of one that take long delay its own only."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(2 * PLACES, "decoder")  # each waits for a decoding process
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._groups: dict[str, Group] = {}  # small files that wait, by stream
        self._at_work: dict[str, asyncio.Task[None]] = {}

    async def decode(self, stream: str, files: Sequence[bytes]) -> list[Picture]:
        """Decode the files of a request."""
        loop = asyncio.get_running_loop()
        if len(files) > 1 or len(files[0]) > SMALL_BYTES:
            async with self._turns.setdefault(stream, asyncio.Semaphore(PLACES)):
                return await loop.run_in_executor(self._threads, read_uploads, files, self._limits)
        pictures: asyncio.Future[list[Picture]] = loop.create_future()
        self._groups.setdefault(stream, []).append((files[0], pictures))
        if stream not in self._at_work:
            self._at_work[stream] = loop.create_task(self._decode_groups(stream))
        return await pictures

    async def _decode_groups(self, stream: str) -> None:
        """Decode what waits, and what comes meanwhile."""
        while waiting := self._groups.pop(stream, []):
            group, self._groups[stream] = waiting[:MOST_TOGETHER], waiting[MOST_TOGETHER:]
            files, loop = [data for data, _ in group], asyncio.get_running_loop()
            results = await loop.run_in_executor(self._threads, read_each, files, self._limits)
            for (_, pictures), result in zip(group, results, strict=True):
                if pictures.done():  # its caller gave up
                    continue
                if isinstance(result, Exception):
                    pictures.set_exception(result)
                else:
                    pictures.set_result(result)
        del self._at_work[stream]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
