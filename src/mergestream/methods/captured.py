"""Steps of a method on a CUDA device, replayed from graphs: which batch is taken how, and what is found out late."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mergestream.functional.scores import not_finite
from mergestream.methods.recorded import IMAGES, Record, RecordedStep, cuda_graph
from mergestream.methods.step import Step
from mergestream.runtime.errors import InputError

if TYPE_CHECKING:
    from mergestream.methods.base import Method

# A graph keeps its places: sizes of batches beyond these are padded to a recorded one, or taken eagerly.
MOST_RECORDED = 8
# How far the host may run ahead of what it has looked at.
MOST_UNSEEN = 16
Key = tuple[Hashable, int, bool]  # the kind of batch and of step, how many images, whether padded to it


class Message(Protocol):
    """Numbers on their way from the device to the host."""

    def arrived(self) -> bool: ...

    def wait(self) -> Tensor: ...


class PinnedMessage:
    """Sent without waiting; the host asks later whether they have come."""

    def __init__(self, values: Tensor) -> None:
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> Tensor:
        self._event.synchronize()
        return self._values


@dataclass(frozen=True)
class Way:
    """What a kind of device offers: how a step is recorded, and how numbers reach the host."""

    record: Record
    send: Callable[[Tensor], Message]


def way_of(device: torch.device) -> Way | None:
    return Way(cuda_graph, PinnedMessage) if device.type == "cuda" else None


@dataclass(frozen=True)
class _Unseen:
    images: int
    recorded: RecordedStep
    message: Message
    before: dict[str, Any]


class Captured:
    """Graphs of one method's step. `lent`, where given, is the method they are recorded from, with its own weights."""

    def __init__(self, way: Way, lent: Method | None = None) -> None:
        self.lent, self._way = lent, way
        self._recorded: dict[Key, RecordedStep] = {}
        self._met: Counter[Key] = Counter()
        self._unseen: deque[_Unseen] = deque()

    def forget(self) -> None:
        """Nothing of the stream so far is waited for."""
        self._unseen.clear()

    def step(self, owner: Method, images: Tensor, known: Mapping[str, Tensor]) -> Step | None:
        """One step, or None where this batch is better taken eagerly: of its shape it is the first."""
        self.look(owner, wait=len(self._unseen) >= MOST_UNSEEN)
        owner._answers_from(None if self.lent is None else self)
        inputs = {IMAGES: images, **known}
        recorded = self._choose(owner, inputs)
        if recorded is None:
            return None
        before = owner._state()
        flat = recorded(inputs, owner._carried())
        fields, carried = recorded.split(flat, len(images))
        owner._carry(carried)
        owner._advance(eager=False)
        message = self._way.send(flat[: recorded.looked_at])
        self._unseen.append(_Unseen(len(images), recorded, message, before))
        return Step(**fields, graph=recorded.batch)  # type: ignore[arg-type]

    def look(self, owner: Method, *, wait: bool = False) -> None:
        """Look at what has arrived; an answer that was not finite is refused now, late though it is."""
        while self._unseen and (wait or self._unseen[0].message.arrived()):
            seen = self._unseen.popleft()
            values = seen.message.wait()
            refused = seen.recorded.refused(values, seen.images)
            if refused is None:
                owner._hear(seen.recorded.told(values))
                continue
            # Where nothing came after it, as if it had never been; else what it merged is at least not used again.
            owner._restore(owner._state() if self._unseen else seen.before)
            whose = "this batch" if not self._unseen else f"the batch {len(self._unseen)} before this one"
            raise not_finite(*refused, whose)

    def _choose(self, owner: Method, inputs: Mapping[str, Tensor]) -> RecordedStep | None:
        images = inputs[IMAGES]
        kind = (owner._branch(), owner._with_experts, images.shape[1:], images.dtype, tuple(sorted(inputs)))
        if owner._as_then is not None:
            return self._repeated(owner, inputs, kind, owner._as_then[0])
        exact = (kind, len(images), False)
        self._met[exact] += 1
        if exact in self._recorded:
            return self._recorded[exact]
        room = len(self._recorded) < MOST_RECORDED
        if self._met[exact] > 1 and room:
            return self._record(exact, owner, inputs)
        larger = [size for of, size, padded in self._recorded if of == kind and not padded and size > len(images)]
        if not larger or not owner._takes_padding():
            return None
        padded = (kind, min(larger), True)
        if padded in self._recorded:
            return self._recorded[padded]
        return self._record(padded, owner, inputs) if room else None

    def _repeated(
        self, owner: Method, inputs: Mapping[str, Tensor], kind: Hashable, size: int | None
    ) -> RecordedStep | None:
        """The graph that a step came from before, recorded again if need be; None where it came from none."""
        batch = len(inputs[IMAGES])
        if size is None:
            return None
        if size < batch:
            raise InputError(f"A graph of {size} images cannot hold this batch of {batch}.")
        key = (kind, size, size > batch)
        return self._recorded.get(key) or self._record(key, owner, inputs)

    def _record(self, key: Key, owner: Method, inputs: Mapping[str, Tensor]) -> RecordedStep:
        _, size, padded = key
        shapes = {name: _with_size(tensor, size, 0 if name == IMAGES else 1) for name, tensor in inputs.items()}
        source = self.lent or owner
        # Recording runs the step, which must not move what the owner carries.
        carried = {name: tensor.clone() for name, tensor in owner._carried().items()}
        with _following(source, owner):
            self._recorded[key] = RecordedStep(source, shapes, carried, padded=padded, record=self._way.record)
        return self._recorded[key]


@contextmanager
def _following(source: Method, owner: Method) -> Iterator[None]:
    """A block in which the lent method decides as its borrower does."""
    if source is not owner:
        source._restore(owner._state())
    source._decided, source._with_experts = owner._branch(), owner._with_experts
    try:
        yield
    finally:
        source._decided = None


def _with_size(tensor: Tensor, size: int, dim: int) -> Tensor:
    """The tensor itself, or as many of its entries over again as make up the size."""
    if tensor.shape[dim] == size:
        return tensor
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
