"""Batches made ready ahead of the caller: decoded by threads and copied by a side stream while a step runs.

Threads only fill host memory. Every CUDA call is made by the caller's thread, between two of its steps: a graph that is
being captured would be spoilt by another thread that allocates or asks for an event.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.data.datasets.base import DomainData
from mergestream.data.datasets.lazy import FileDomain, FileImages, as_positions
from mergestream.data.datasets.threads import decoder_threads
from mergestream.data.pinned import Copies, CudaCopies, Event, PinnedRing, Slot, host_memory
from mergestream.runtime.option_checks import whole_number

Indices = Tensor | np.ndarray
Fed = Generator[Tensor, None, None]


def feed(data: DomainData, batches: Iterable[Indices], device: torch.device | str, *, ahead: int = 2) -> Fed:
    """uint8 [B,3,H,W] of every batch of indices, in order: on the device if that is a GPU, else in host memory.

    While the caller works on one batch, up to `ahead` more are decoded and copied. What lies in memory and is wanted
    there is simply handed over, without a thread. Whoever stops early closes the generator, or lets go of it.
    """
    whole_number("ahead", ahead, low=1)
    device = torch.device(device)
    if isinstance(data, FileDomain) and data.files is not None and data.gpu:
        copies = CudaCopies(device if device.type == "cuda" else torch.device("cuda"))
        return _ahead(GpuDecoding(data, data.files, copies, device, ahead), batches, ahead)
    if device.type == "cuda":
        return _ahead(Copying(data, CudaCopies(device), ahead), batches, ahead)
    return _as_it_lies(data, batches) if data.in_memory else _ahead(Decoding(data), batches, ahead)


def _as_it_lies(data: DomainData, batches: Iterable[Indices]) -> Fed:
    for indices in batches:
        yield data.batch(torch.as_tensor(indices))


@dataclass
class Batch:
    """A batch and the work on it: by threads, then, on its way to a GPU, by the side stream."""

    positions: list[int]
    work: list[Future]
    memory: Tensor | None = None  # [B,3,H,W] that the work fills
    slot: Slot | None = None
    arriving: tuple[Tensor, Event] | None = None

    def good(self) -> bool:
        """Whether the threads are done, and nothing went wrong: what did is told when its turn has come."""
        return all(piece.done() and not piece.cancelled() and piece.exception() is None for piece in self.work)

    def results(self) -> list[Any]:
        """Waits; raises what went wrong first, in the order of the images, with the thread's own traceback."""
        wait(self.work, return_when=FIRST_EXCEPTION)  # woken once, not by every image
        return [piece.result() for piece in self.work]


class Decoding:
    """Into host memory: every batch has memory of its own, which is the caller's to keep."""

    def __init__(self, data: DomainData) -> None:
        # The one thread that gathers what lies in memory may use all cores for it.
        self._data, self._threads = data, ThreadPoolExecutor(1) if data.in_memory else decoder_threads(data.decoders)

    def start(self, positions: list[int]) -> Batch:
        return self._fill(positions, host_memory((len(positions), *self._data.shape[1:])))

    def urge(self, waiting: Iterable[Batch]) -> None:
        """Do what can be done without waiting for any thread."""

    def take(self, batch: Batch) -> Tensor:
        batch.results()
        assert batch.memory is not None
        return batch.memory

    def close(self) -> None:
        """Ends after the images under way; those that no thread has begun are dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _fill(self, positions: list[int], memory: Tensor) -> Batch:
        pieces = self._data.pieces(positions, memory)
        return Batch(positions, [self._threads.submit(piece) for piece in pieces], memory)


class Copying(Decoding):
    """Into pinned memory, and from there to a GPU; the host waits for decoders only."""

    def __init__(self, data: DomainData, copies: Copies, ahead: int) -> None:
        super().__init__(data)
        self._copies, self._ahead = copies, ahead
        # One for each batch being decoded, and one whose copy may still be under way.
        self._ring = PinnedRing(ahead + 2, data.shape[1:], copies)
        self._reached: deque[Event] = deque()

    def start(self, positions: list[int]) -> Batch:
        slot = self._ring.take(len(positions))
        batch = self._fill(positions, slot.memory[: len(positions)])
        batch.slot = slot
        return batch

    def urge(self, waiting: Iterable[Batch]) -> None:
        for batch in takewhile(Batch.good, waiting):
            self._send(batch)
        # The host may be only so far ahead of the device: its batches would pile up there.
        self._reached.append(self._copies.here())
        if len(self._reached) > self._ahead + 1:
            self._reached.popleft().synchronize()

    def take(self, batch: Batch) -> Tensor:
        return self._copies.receive(*self._send(batch))

    def _send(self, batch: Batch) -> tuple[Tensor, Event]:
        if batch.arriving is None:
            batch.arriving = self._sent(batch)
        return batch.arriving

    def _sent(self, batch: Batch) -> tuple[Tensor, Event]:
        batch.results()
        assert batch.memory is not None
        assert batch.slot is not None
        images, batch.slot.copied = self._copies.send(batch.memory)
        return images, batch.slot.copied


class GpuDecoding(Copying):
    """JPEGs read by threads, decoded by the GPU in the side stream. The host waits for nvJPEG, the device does not."""

    def __init__(
        self, data: DomainData, files: FileImages, copies: CudaCopies, device: torch.device, ahead: int
    ) -> None:
        super().__init__(data, copies, ahead)
        self._files, self._side, self._device = files, copies, device

    def start(self, positions: list[int]) -> Batch:
        return Batch(positions, [self._threads.submit(self._files.for_gpu, position) for position in positions])

    def take(self, batch: Batch) -> Tensor:
        return super().take(batch).to(self._device)

    def _sent(self, batch: Batch) -> tuple[Tensor, Event]:
        given = batch.results()
        return self._side.beside(lambda device: self._files.on_gpu(batch.positions, given, device))


def _ahead(lane: Decoding, batches: Iterable[Indices], ahead: int) -> Fed:
    waiting: deque[Batch] = deque()
    try:
        for indices in _then_none(batches, ahead):
            if indices is not None:
                waiting.append(lane.start(as_positions(torch.as_tensor(indices))))
            if waiting and (indices is None or len(waiting) > ahead):
                lane.urge(waiting)
                yield lane.take(waiting.popleft())
    finally:
        lane.close()


def _then_none(batches: Iterable[Indices], times: int) -> Iterator[Indices | None]:
    yield from batches
    yield from (None,) * times
