"""One step of a method as a CUDA graph: recorded once for a shape of batch, replayed without the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mergestream.functional.scores import finite_images
from mergestream.methods.state import State, Step, numbers, replaced, tensors
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.execution import warm_up
from mergestream.pool.runner import Batch

if TYPE_CHECKING:
    from mergestream.methods.base import Method

IMAGES = "images"
ANSWER = "The answer"
EXPERTS = "expert_logits"
STATE = "state."  # prefix of the next state's tensors among a step's results
LARGE = 1 << 14  # numbers of a state that is no longer small beside a Step


Replay = Callable[[], None]  # does again what a recorded function did
Record = Callable[[Callable[[], None]], Replay]


def cuda_graph(function: Callable[[], None]) -> Replay:
    """Record what the function launches."""
    warm_up(function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_memory().pool()):
        function()
    return graph.replay


@lru_cache(maxsize=1)
def _memory() -> torch.cuda.CUDAGraph:
    """One memory pool for all graphs: they run one after the other, so each may use what the others used.

    It belongs to this graph, which stays: a pool whose last graph is gone cannot be recorded into again.
    """
    anchor, place = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(anchor):
        place.add_(1)
    return anchor


class RecordedStep:
    """A method's step on batches of one shape, for one choice of its decisions on the host.

    It reads its inputs and the state from places of its own and writes all results into one flat vector: first whether
    each network's answer was finite for each image, then the next state's alarm, the Step's tensors, and the tensors
    of the next state that the step changes.
    """

    def __init__(
        self, method: Method[Any], inputs: Mapping[str, Tensor], *, padded: bool, with_experts: bool, record: Record
    ) -> None:
        device, state = method.pool.device, method.state
        self.batch = len(inputs[IMAGES])
        self._with_experts = with_experts
        self._inputs = {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in inputs.items()}
        self._state = replaced(state, {name: tensor.clone() for name, tensor in tensors(state).items()})
        self._after: State = self._state
        self._filled: dict[str, Tensor] = {}  # what the state's places hold
        self._shares = torch.full((self.batch,), 1 / self.batch, device=device) if padded else None
        self._owners: list[str] = []
        self._flags: list[torch.Size] = []  # of each owner [V,B]: one per image that it saw, in V views
        self.has_alarm = False
        self._pieces: dict[str, tuple[int, torch.Size, torch.dtype]] = {}  # of the flat result, in order
        self._large = False
        self._counted: dict[str, int] = {}  # how a step changes the state's whole numbers
        self._flat = torch.empty(0, device=device)
        self._pool_passes, self._passes = method.pool.passes, dict.fromkeys(method.pool.passes, 0)
        self._fill(inputs, state)
        self._replay = record(lambda: self._run(method))

    def __call__(self, inputs: Mapping[str, Tensor], state: State) -> Tensor:
        """Take the step; the flat result belongs to the caller."""
        self._fill(inputs, state)
        self._replay()
        return self._flat.clone()

    def count_passes(self) -> None:
        """Count a replay's images among those that passed through the pool's networks."""
        for kind, images in self._passes.items():
            self._pool_passes[kind] += images

    @property
    def checked(self) -> int:
        """How many numbers of the flat result the host checks."""
        return sum(shape.numel() for shape in self._flags) + self.has_alarm

    def refused(self, flags: Tensor, batch: int) -> tuple[str, list[int]] | None:
        """Which network gave an answer that is not finite, and for which images; None where all are finite."""
        refusal = None
        parts = flags[: self.checked - self.has_alarm].split([shape.numel() for shape in self._flags])
        for owner, shape, own in zip(self._owners, self._flags, parts, strict=True):
            bad = (own.view(shape).amin(dim=0)[:batch] < 0.5).nonzero().flatten().tolist()
            refusal = (owner, bad) if bad and (refusal is None or refusal[0] == ANSWER) else refusal
        return refusal

    def split(self, flat: Tensor, batch: int, before: State) -> tuple[Step, State]:
        """The Step and the next state, as views of the flat result of the last call, which was on the state before."""
        fields: dict[str, Tensor] = {}
        carried: dict[str, Tensor] = {}
        large, sizes = self._large, [size for size, _, _ in self._pieces.values()]
        parts = zip(self._pieces.items(), flat[self.checked :].split(sizes), strict=True)
        for (name, (_, shape, dtype)), part in parts:
            if name.startswith(STATE):
                carried[name.removeprefix(STATE)] = part.view(shape).to(dtype)
            else:  # Steps may be kept for long, and a view would keep the whole state with them
                fields[name] = (part.clone() if large else part).view(shape).to(dtype)
        fields["logits"] = fields["logits"][:batch]
        if EXPERTS in fields:
            fields[EXPERTS] = fields[EXPERTS][:, :batch]
        counted = {name: value + self._counted[name] for name, value in numbers(before).items()}
        expert, merged, backward = (self._passes[kind] / self.batch for kind in ("expert", "merged", "backward"))
        step = Step(**fields, graph=self.batch, expert_forwards=expert, merged_forwards=merged, backwards=backward)  # type: ignore[arg-type]
        return step, replaced(self._after, {**self._filled, **carried, **counted})

    # --- inside ---------------------------------------------------------------------------------------------

    def _fill(self, inputs: Mapping[str, Tensor], state: State) -> None:
        for name, place in self._inputs.items():
            given, dim = inputs[name], 0 if name == IMAGES else 1
            count = given.shape[dim]
            place.narrow(dim, 0, count).copy_(given, non_blocking=True)
            if count < place.shape[dim]:  # padded with the first image, which is as finite as the batch is
                place.narrow(dim, count, place.shape[dim] - count).copy_(given.narrow(dim, 0, 1), non_blocking=True)
        given_tensors, places = tensors(state), tensors(self._state)
        moved = [name for name in places if given_tensors[name] is not self._filled.get(name)]
        if moved:  # one launch for all: a state has dozens of small tensors
            new = [given_tensors[name] for name in moved]
            torch._foreach_copy_([places[name] for name in moved], new, non_blocking=True)
        self._filled = given_tensors
        if self._shares is not None:
            count = len(inputs[IMAGES])
            self._shares[:count].fill_(1 / count)
            self._shares[count:].zero_()

    def _run(self, method: Method[Any]) -> None:
        """The step, from the places of the inputs to the flat result."""
        # What the graph does not merge, it finds merged.
        method.held_from = method.merged_from(self._state) if method.reuses_weights else None
        expert_logits = {name: place for name, place in self._inputs.items() if name != IMAGES}
        before = method.pool.passes.copy()
        with method.pool.recording() as recording:
            batch = Batch(method.pool.prepare(self._inputs[IMAGES]), expert_logits, self._shares, {*expert_logits})
            step, self._after = method.advance(batch, self._state)
            results = {name: value for name, value in vars(step).items() if isinstance(value, Tensor)}
            if self._with_experts:
                results[EXPERTS] = method.pool.logits_of_views(batch)[ORIGINAL]
        # A replay counts these passes; recording them is no step.
        self._passes = {kind: images - before[kind] for kind, images in method.pool.passes.items()}
        method.pool.passes.update(before)
        checked = [step.logits[None], *recording.logits]
        finite = finite_images(torch.cat([logits.flatten(0, 1) for logits in checked]))
        places, alarm = tensors(self._state), method.alarm(self._after)
        after = {name: value for name, value in tensors(self._after).items() if value is not places.get(name)}
        self._owners, first = [ANSWER, *recording.owners], numbers(self._state)
        self._counted = {name: value - first[name] for name, value in numbers(self._after).items() if name in first}
        self._flags, self.has_alarm = [logits.shape[:2] for logits in checked], alarm is not None
        named = {**results, **{f"{STATE}{name}": tensor for name, tensor in after.items()}}
        self._pieces = {name: (tensor.numel(), tensor.shape, tensor.dtype) for name, tensor in named.items()}
        self._large = sum(tensor.numel() for tensor in after.values()) > LARGE
        parts = [finite, *([] if alarm is None else [alarm]), *results.values()]
        if after:  # a batch that will be refused leaves no trace in the state
            old = flattened(places[name] for name in after)
            parts.append(torch.where(finite.all(), flattened(after.values()), old))
        self._flat = flattened(parts)


def flattened(parts: Iterable[Tensor]) -> Tensor:
    """All numbers of some tensors, in order, in fp32."""
    return torch.cat([part.reshape(-1).to(torch.float32) for part in parts])
