"""One step of a method as a CUDA graph: recorded once for a shape of batch, replayed without the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mergestream.functional.scores import finite_images
from mergestream.methods.step import Step
from mergestream.pool.execution import warm_up

if TYPE_CHECKING:
    from mergestream.methods.base import Method

IMAGES = "images"
ANSWER = "The answer"
LARGE = 1 << 14  # numbers: what is carried on is no longer small beside a Step


class Replay(Protocol):
    """A function without arguments that was recorded: calling it does again what the function did."""

    def __call__(self) -> None: ...


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
    """One pool of memory for all graphs: they run one after the other, so that each may use what the others used.

    It is this graph's, which stays: a pool whose last graph is gone cannot be recorded into again.
    """
    anchor, place = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(anchor):
        place.add_(1)
    return anchor


@dataclass(frozen=True)
class Piece:
    """Where one tensor lies in the flat answer of a recorded step."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    def of(self, part: Tensor) -> Tensor:
        return part.view(self.shape).to(self.dtype)


class RecordedStep:
    """A method's step on batches of one shape, for one course of the method's own decisions.

    It reads its inputs from places of its own and leaves all that it found in one flat vector: first whether images
    were finite for each owner, then what the method tells the host, then the Step, then what is carried on.
    """

    def __init__(
        self,
        method: Method,
        inputs: Mapping[str, Tensor],
        carried: Mapping[str, Tensor],
        *,
        padded: bool,
        record: Record,
    ) -> None:
        device = method.pool.device
        self.batch = len(inputs[IMAGES])
        self._inputs = {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in inputs.items()}
        self._carried = {name: tensor.clone() for name, tensor in carried.items()}
        self._shares = torch.full((self.batch,), 1 / self.batch, device=device) if padded else None
        self._owners: list[str] = []
        self._counts: list[int] = []  # flags of each owner: one an image, of every view it saw
        self._pieces: list[Piece] = []
        self._told: tuple[str, ...] = ()
        self._flat = torch.empty(0, device=device)
        self._fill(inputs, carried)
        self._replay = record(lambda: self._run(method))

    def __call__(self, inputs: Mapping[str, Tensor], carried: Mapping[str, Tensor]) -> Tensor:
        """Take the step; its flat answer is the caller's own."""
        self._fill(inputs, carried)
        self._replay()
        return self._flat.clone()

    @property
    def looked_at(self) -> int:
        """How much of the flat answer is for the host."""
        return sum(self._counts) + len(self._told)

    def refused(self, looked_at: Tensor, batch: int) -> tuple[str, list[int]] | None:
        """Who gave an answer that is not finite, and for which images, if any; `looked_at` lies on the host."""
        found = None
        for owner, flags in zip(self._owners, looked_at[: sum(self._counts)].split(self._counts), strict=True):
            bad = (flags.view(-1, self.batch)[:, :batch] < 0.5).any(dim=0).nonzero().flatten().tolist()
            found = (owner, bad) if bad and (found is None or found[0] == ANSWER) else found
        return found

    def told(self, looked_at: Tensor) -> dict[str, float]:
        return dict(zip(self._told, looked_at[sum(self._counts) :].tolist(), strict=True))

    def split(self, flat: Tensor, batch: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The Step's fields and what is carried on, as views of a flat answer."""
        sizes = {piece.name: piece.shape.numel() for piece in self._pieces}
        large = sum(sizes[name] for name in self._carried) > LARGE
        fields: dict[str, Tensor] = {}
        carried: dict[str, Tensor] = {}
        for piece, part in zip(self._pieces, flat[self.looked_at :].split(list(sizes.values())), strict=True):
            if piece.name in self._carried:
                carried[piece.name] = piece.of(part)
            else:  # Steps may be kept for long, and a view would keep all that was carried on with them
                fields[piece.name.removeprefix("step.")] = piece.of(part.clone() if large else part)
        fields["logits"] = fields["logits"][:batch]
        if "expert_logits" in fields:
            fields["expert_logits"] = fields["expert_logits"][:, :batch]
        return fields, carried

    # --- inside ---------------------------------------------------------------------------------------------

    def _fill(self, inputs: Mapping[str, Tensor], carried: Mapping[str, Tensor]) -> None:
        for name, place in self._inputs.items():
            given, dim = inputs[name], 0 if name == IMAGES else 1
            count = given.shape[dim]
            place.narrow(dim, 0, count).copy_(given, non_blocking=True)
            if count < place.shape[dim]:  # padded with the first image, which is as finite as the batch is
                place.narrow(dim, count, place.shape[dim] - count).copy_(given.narrow(dim, 0, 1), non_blocking=True)
        for name, place in self._carried.items():
            place.copy_(carried[name], non_blocking=True)
        if self._shares is not None:
            count = len(inputs[IMAGES])
            self._shares[:count].fill_(1 / count)
            self._shares[count:].zero_()

    def _run(self, method: Method) -> None:
        """The step, from the places of the inputs to the flat answer."""
        before = method._carried()
        known = {name: place for name, place in self._inputs.items() if name != IMAGES}
        method._shares = self._shares
        try:
            with method.pool.recording() as recording:
                method._carry(self._carried)
                step = method._step(method.pool.prepare(self._inputs[IMAGES]), known)
                after, told = method._carried(), method._tells()
        finally:
            method._carry(before)
            method._shares = None
        finite = torch.cat([finite_images(step.logits), *recording.finite])
        # A batch that will be refused leaves no trace in what is carried on.
        sound = finite.all()
        kept = {name: torch.where(sound, tensor, self._carried[name]) for name, tensor in after.items()}
        self._owners, self._told = [ANSWER, *recording.owners], tuple(told)
        self._counts = [self.batch, *map(len, recording.finite)]
        self._write(finite, told, _fields(step), kept)

    def _write(
        self, finite: Tensor, told: Mapping[str, Tensor], fields: Mapping[str, Tensor], kept: Mapping[str, Tensor]
    ) -> None:
        answers = {**{f"step.{name}": tensor for name, tensor in fields.items()}, **kept}
        self._pieces = [Piece(name, tensor.shape, tensor.dtype) for name, tensor in answers.items()]
        parts = [finite, *told.values(), *answers.values()]
        self._flat = torch.cat([part.reshape(-1).to(torch.float32) for part in parts])


def _fields(step: Step) -> dict[str, Tensor]:
    return {name: value for name, value in vars(step).items() if isinstance(value, Tensor)}
