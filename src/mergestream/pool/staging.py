"""Rows of a bank that stays on the host, brought to a device one after the other: one computes, the next is copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from mergestream.functional.merging import Rows
from mergestream.runtime.errors import InputError, PoolError

Result = TypeVar("Result")
SLOTS = 2
# Methods that look at one expert at a time. All others need the whole bank on the device.
STREAMED = ("entropy_adaptive", "mean", "ensemble", "single_expert", "select_expert")
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
# Whole pages are pinned. From this size on (glibc's largest threshold) memory shares none with that of others.
LEAST_PINNED = 32 * 2**20


class Lane(Protocol):
    """How rows travel to a device: beside its computing, which waits for them and which they wait for."""

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Start to copy once the moment `after` has passed; the moment at which it is done."""

    def wait(self, moment: Any) -> None:
        """What is computed from now on waits for the moment."""

    def mark(self) -> Any:
        """The moment at which all that was asked to be computed so far is done."""


class SameLane:
    """A device that does one thing after the other."""

    def copy(self, target: Tensor, source: Tensor, after: None) -> None:  # noqa: ARG002
        target.copy_(source)

    def wait(self, moment: None) -> None: ...

    def mark(self) -> None: ...


class CudaLane:
    """A CUDA stream for the copies of a bank; moments are events, so that nothing waits on the host."""

    def __init__(self, device: torch.device, bank: Tensor) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        # Held here: they go after the stream has come to its end, so that nothing is on its way from them.
        self._bank, self._pages = bank, pinned(bank)
        weakref.finalize(self, self._stream.synchronize).atexit = False

    def copy(self, target: Tensor, source: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        # The allocator must not hand the row's memory on while this stream still writes to it.
        target.record_stream(self._stream)
        return self._stream.record_event()

    def wait(self, moment: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(moment)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._device).record_event()


class Staging:
    """Two rows [P] on the device, through which the rows of a bank [K,P] pass; `copies` counts them."""

    def __init__(self, bank: Tensor, device: torch.device, lane: Lane | None = None) -> None:
        self._bank, self.copies = bank, 0
        self._lane: Lane = lane or (CudaLane(device, bank) if device.type == "cuda" else SameLane())
        with torch.inference_mode(False):
            slots = range(min(SLOTS, len(bank)))
            self.rows = [torch.empty(bank.shape[1], dtype=bank.dtype, device=device) for _ in slots]
        self._holds: list[int | None] = [None for _ in slots]
        self._arrived: list[Any] = [None for _ in slots]
        # What used a slot's memory before it was a slot's must be done, too.
        self._read = [self._lane.mark() for _ in slots]
        self._latest = 0

    def map(self, experts: Sequence[int], use: Callable[[int, int], Result]) -> list[Result]:
        """use(expert, slot) for each expert, while the one after it is copied into the other slot."""
        results = []
        for expert, following in zip_longest(experts, experts[1:]):
            slot = self._fetch(expert)
            if following is not None:
                self._fetch(following)
            self._lane.wait(self._arrived[slot])
            try:
                results.append(use(expert, slot))
            finally:
                self._read[slot] = self._lane.mark()
        return results

    def _fetch(self, expert: int) -> int:
        """Have the expert's row copied unless it is there; the slot fetched last is in use and is left alone."""
        if expert in self._holds:
            self._latest = self._holds.index(expert)
            return self._latest
        slot = (self._latest + 1) % len(self.rows)
        self._holds[slot] = None
        self._arrived[slot] = self._lane.copy(self.rows[slot], self._bank[expert], self._read[slot])
        self._holds[slot], self._latest = expert, slot
        self.copies += 1
        return slot


class RunningSum:
    """out [n] = sum of c * row, one row at a time, in at least fp32, by the rules of `merging.weighted_sum`."""

    def __init__(self, out: Tensor, dtype: torch.dtype) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self._out = out
        self._total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
        self._empty = True

    def add(self, row: Tensor, coefficient: float) -> None:
        if coefficient == 0:
            return
        if not self._empty:
            self._total.add_(row, alpha=coefficient)
        elif row.dtype == self._total.dtype:
            torch.mul(row, coefficient, out=self._total)
        else:
            # Copied before it is scaled: bf16 times a number would round to bf16 first.
            self._total.copy_(row).mul_(coefficient)
        self._empty = False

    def finish(self) -> None:
        if self._empty:
            self._out.zero_()
        elif self._total is not self._out:
            self._out.copy_(self._total)


class HostRows(Rows):
    """encoder [K,E] on the host; head [K,H] on the device, once somebody asks for it. Spans of them are refused."""

    _bank: Tensor
    _there: torch.device

    def __init__(self, bank: Tensor, encoder_size: int, device: torch.device) -> None:
        object.__setattr__(self, "encoder", bank[:, :encoder_size])
        object.__setattr__(self, "_bank", bank)
        object.__setattr__(self, "_there", device)

    @cached_property
    def head(self) -> Tensor:
        return self._bank[:, self.encoder.shape[1] :].to(self._there)

    def span(self, start: int, stop: int) -> Tensor:  # noqa: ARG002
        refuse(self._bank, "What compares experts number by number")

    def segments(self) -> NoReturn:
        refuse(self._bank, "What compares experts number by number")


class Pages:
    """A tensor's host memory, pinned in place for as long as this object lives: a device copies it by itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()  # the memory must not go while it is pinned
        place, size = self._storage.data_ptr(), self._storage.nbytes()
        error = int(torch.cuda.cudart().cudaHostRegister(place, size, _PORTABLE))
        if error:
            raise PoolError(
                f"The driver would not pin {size / 2**30:.1f} GiB of host memory (CUDA error {error}). Raise the limit "
                f"of locked memory (ulimit -l), load the pool with dtype=torch.bfloat16, or keep fewer experts."
            )
        weakref.finalize(self, _unpin, place).atexit = False


_pinned: weakref.WeakValueDictionary[int, Pages] = weakref.WeakValueDictionary()


def pinned(tensor: Tensor) -> Pages | None:
    """Keep what this returns while the tensor's memory is to stay pinned; None if it is small, or pinned by others."""
    place, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    pages = _pinned.get(place)
    if pages is None and size >= LEAST_PINNED and not tensor.is_pinned():
        pages = _pinned[place] = Pages(tensor)
    return pages


def _unpin(place: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(place)


def refuse(bank: Tensor, what: str) -> NoReturn:
    raise PoolError(
        f"{what} needs all {len(bank)} experts on the device at once ({bank.nbytes / 2**30:.1f} GiB), and this pool "
        f"keeps them on the host. Take a device that holds them (ExpertPool.load(folder, device='cuda')), fewer "
        f"experts, or a method that takes one after the other: {', '.join(STREAMED)}."
    )


def present(device: torch.device | str) -> torch.device:
    """The device as its tensors name it; refused where this machine has none."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"Cannot compute on {str(device)!r} here ({reason}). Give device='cpu', or 'cuda' where there is a GPU."
        ) from error
