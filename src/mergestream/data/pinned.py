"""Pinned host memory, used in turn, and copies from it to a GPU beside what the caller runs there."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the order of a stream that the host can wait for."""

    def synchronize(self) -> None: ...


class Copies(Protocol):
    """Copies from pinned memory to a device, beside what the caller runs there."""

    def pinned(self, shape: tuple[int, ...]) -> Tensor: ...

    def send(self, host: Tensor) -> tuple[Tensor, Event]: ...

    def receive(self, images: Tensor, copied: Event) -> Tensor: ...

    def here(self) -> Event: ...


@dataclass
class Slot:
    """Pinned memory of one batch, free again once `copied` has come to pass."""

    memory: Tensor
    copied: Event | None = None


class PinnedRing:
    """Pinned memory, used in turn: pinning costs more than the copy. A batch may be smaller than its slot."""

    def __init__(self, slots: int, image_shape: tuple[int, ...], copies: Copies) -> None:
        self._most, self._image_shape, self._copies = slots, image_shape, copies
        self._slots: deque[Slot] = deque()

    def take(self, images: int) -> Slot:
        """The slot that was used longest ago, once its copy is finished."""
        if len(self._slots) < self._most:
            slot = Slot(self._copies.pinned((images, *self._image_shape)))
        else:
            slot = self._slots.popleft()
            assert slot.copied is not None, "a batch that was not sent yet would be overwritten"
            slot.copied.synchronize()
            slot.copied = None
            if len(slot.memory) < images:
                slot.memory = self._copies.pinned((images, *self._image_shape))
        self._slots.append(slot)
        return slot


class CudaCopies:
    """On one side stream a device; the caller's stream waits there for a copy, the host does not."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = side_stream(torch.cuda.current_device() if device.index is None else device.index)

    def pinned(self, shape: tuple[int, ...]) -> Tensor:
        return host_memory(shape, pinned=True)

    def send(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        return self.beside(lambda device: host.to(device, non_blocking=True))

    def beside(self, work: Callable[[torch.device], Tensor]) -> tuple[Tensor, torch.cuda.Event]:
        """What `work` makes in the side stream, and when it will be there."""
        with torch.cuda.stream(self._side):
            return work(self._side.device), self._event(self._side)

    def receive(self, images: Tensor, copied: Any) -> Tensor:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        images.record_stream(stream)  # its memory is the side stream's, which would use it again too early
        return images

    def here(self) -> torch.cuda.Event:
        return self._event(torch.cuda.current_stream(self._device))

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # whoever waits sleeps, and leaves the core to the decoders
        event.record(stream)
        return event


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """One for each device: memory is kept by stream, and a new one a run would keep it many times."""
    return torch.cuda.Stream(device)


def host_memory(shape: tuple[int, ...], *, pinned: bool = False) -> Tensor:
    # Outside of a caller's inference mode, which holds for its own thread only: others could not write there.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
