"""CUDA graphs of one method's step: which batch is replayed from which graph, and what is refused late."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mergestream.functional.scores import not_finite
from mergestream.methods.recorded_step import IMAGES, Record, RecordedStep, cuda_graph
from mergestream.methods.state import Step
from mergestream.runtime.errors import InputError

if TYPE_CHECKING:
    from mergestream.methods.base import Method

# A graph keeps its memory. Batch sizes beyond these are padded to a recorded one, or taken eagerly.
MOST_RECORDED = 8
# How far the host may run ahead of the answers it has checked.
MOST_UNCHECKED = 16
Key = tuple[Hashable, int, bool]  # the kind of batch and of step, how many images, whether padded to that size


class PinnedMessage:
    """Numbers on their way from the device to the host: a copy into pinned memory that the host does not wait for."""

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
class Recorder:
    """How a kind of device records a step, and how its numbers reach the host."""

    record: Record
    send: Callable[[Tensor], PinnedMessage]


def recorder_for(device: torch.device) -> Recorder | None:
    return Recorder(cuda_graph, PinnedMessage) if device.type == "cuda" else None


@dataclass(frozen=True)
class _Unchecked:
    """A step whose answers the host has not seen yet, and the states before and after it."""

    images: int
    recorded: RecordedStep
    message: PinnedMessage
    before: Any
    after: Any


class Graphs:
    """The graphs of one method, recorded when a shape of batch comes for the second time."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.recorded: dict[Key, RecordedStep] = {}
        self._met: Counter[Key] = Counter()
        self._unchecked: deque[_Unchecked] = deque()
        self._last: _Unchecked | None = None

    def forget(self) -> None:
        """Check no answer of the stream so far."""
        self._unchecked.clear()
        self._last = None

    def step(
        self, method: Method[Any], images: Tensor, expert_logits: Mapping[str, Tensor], with_experts: bool
    ) -> Step | None:
        """Replay one step; None where this batch is better taken eagerly, as the first of its shape is.

        The last step's alarm may still be on its way. The device does not wait for it: this step is taken as if there
        were none, and once more if there was one.
        """
        self.look(method, wait=len(self._unchecked) >= MOST_UNCHECKED)
        inputs, last = {IMAGES: images, **expert_logits}, self._last
        if last is None or last.after is not method.state or not last.recorded.has_alarm:
            method.state = method.before_step(method.state)
            taken = self._replay(method, inputs, with_experts)
        else:
            taken = self._replay(method, inputs, with_experts)
            self.look(method, wait=True)
            decided = method.before_step(method.state, float(last.message.wait()[-1]))
            if decided is not method.state:
                method.state = decided
                taken = self._replay(method, inputs, with_experts)
        if taken is None:
            return None
        step, self._last = taken
        self._last.recorded.count_passes()
        method.state = self._last.after
        method.held_from = method.merged_from(method.state)
        self._unchecked.append(self._last)
        return step

    def _replay(
        self, method: Method[Any], inputs: Mapping[str, Tensor], with_experts: bool
    ) -> tuple[Step, _Unchecked] | None:
        """A step that changes nothing yet, with all that the host can do before it waits for the device."""
        if method.reuses_weights:
            method.merged(method.state)  # now, if at all: a graph may use the weights without merging them
        recorded = self._choose(method, inputs, with_experts)
        if recorded is None:
            return None
        flat, images = recorded(inputs, method.state), len(inputs[IMAGES])
        step, after = recorded.split(flat, images, method.state)
        message = self._recorder.send(flat[: recorded.checked])
        return step, _Unchecked(images, recorded, message, method.state, after)

    def look(self, method: Method[Any], *, wait: bool = False) -> None:
        """Check the answers that have arrived; one that was not finite is refused now, late though it is."""
        while self._unchecked and (wait or self._unchecked[0].message.arrived()):
            step = self._unchecked.popleft()
            refused = step.recorded.refused(step.message.wait(), step.images)
            if refused is None:
                continue
            # Roll back fully if no later batch ran; otherwise discard the merged weights at least.
            if not self._unchecked:
                method.state = step.before
            method.held_from = None
            batch = "this batch" if not self._unchecked else f"the batch {len(self._unchecked)} before this one"
            raise not_finite(*refused, batch)

    def _choose(self, method: Method[Any], inputs: Mapping[str, Tensor], with_experts: bool) -> RecordedStep | None:
        images, phase = inputs[IMAGES], method.phase(method.state)
        if phase is None:
            return None
        kind = (phase, with_experts, images.shape[1:], images.dtype, tuple(sorted(inputs)))
        if method._repeated is not None:
            return self._repeat(method, inputs, kind, method._repeated[0])
        exact = (kind, len(images), False)
        self._met[exact] += 1
        if exact in self.recorded:
            return self.recorded[exact]
        room = len(self.recorded) < MOST_RECORDED
        if self._met[exact] > 1 and room:
            return self._record(exact, method, inputs)
        larger = [size for of, size, padded in self.recorded if of == kind and not padded and size > len(images)]
        if not larger or not method.takes_padding:
            return None
        padded = (kind, min(larger), True)
        if padded in self.recorded:
            return self.recorded[padded]
        return self._record(padded, method, inputs) if room else None

    def _repeat(
        self, method: Method[Any], inputs: Mapping[str, Tensor], kind: Hashable, size: int | None
    ) -> RecordedStep | None:
        """The graph of this batch size, recorded now if need be; None where the step was an eager one."""
        batch = len(inputs[IMAGES])
        if size is None:
            return None
        if size < batch:
            raise InputError(f"A graph of {size} images cannot hold this batch of {batch}.")
        key = (kind, size, size > batch)
        return self.recorded.get(key) or self._record(key, method, inputs)

    def _record(self, key: Key, method: Method[Any], inputs: Mapping[str, Tensor]) -> RecordedStep:
        kind, size, padded = key
        shaped = {name: _with_size(tensor, size, 0 if name == IMAGES else 1) for name, tensor in inputs.items()}
        with_experts = bool(kind[1])  # type: ignore[index]
        record = self._recorder.record
        self.recorded[key] = RecordedStep(method, shaped, padded=padded, with_experts=with_experts, record=record)
        return self.recorded[key]


def _with_size(tensor: Tensor, size: int, dim: int) -> Tensor:
    """The tensor with `size` entries along `dim`, repeated from its first on."""
    if tensor.shape[dim] == size:
        return tensor
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
