"""RegMean (Jin et al. 2023): every linear layer as near as possible to all experts' on their own inputs."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.functional.merging import merge, merge_layer
from mergestream.methods.base import option
from mergestream.methods.merged_model import MergedState, StatisticsModel
from mergestream.methods.state import INSEPARABLE
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics.grams import Gram, Grams, add_grams
from mergestream.pool.statistics.measurement import input_grams
from mergestream.runtime.errors import CheckpointError
from mergestream.runtime.option_checks import number, yes_or_no


def _read_grams(plain: list[dict[str, dict[str, Any]]]) -> list[Grams]:
    return [{name: Gram(value["mean"], value["rows"]) for name, value in own.items()} for own in plain]


@dataclass(frozen=True)
class RegMeanState(MergedState):
    seen: int  # images of the target
    grams: list[Grams] = field(metadata={**INSEPARABLE, "read": _read_grams})  # of each expert, over these images


@dataclass(kw_only=True, eq=False, repr=False)
class RegMean(StatisticsModel[RegMeanState]):
    """Linear layers are solved for; everything else (biases, norms, embeddings) is the mean."""

    name: ClassVar[str] = "regmean"
    ratio: float = option(0.95, number, low=0, high=1)  # factor of the Gram matrices' off-diagonal elements
    ridge: float = option(0.0, number, low=0)  # added to the diagonal of every expert's Gram matrix
    convolutions: bool = option(True, yes_or_no)  # linear maps of their windows; False: their mean, as published

    def start_learning(self) -> RegMeanState:
        return RegMeanState(0, [{} for _ in self.pool.names])

    def _kind_for(self, pool: ExpertPool) -> str:
        return "gram"

    def learn(self, images: Tensor, state: RegMeanState) -> RegMeanState:
        if state.seen >= self.examples:
            return state
        return replace(state, seen=state.seen + len(images), grams=self._measured(images, state))

    def _measured(self, images: Tensor, state: RegMeanState) -> list[Grams]:
        """Every expert's Gram matrices, those of a batch added."""
        new = [input_grams(self.pool, k, images) for k in range(len(self.pool))]
        return [add_grams(old, own) for old, own in zip(state.grams, new, strict=True)]

    def merge_parameters(self, state: RegMeanState, out: Tensor) -> None:
        share = simplex.uniform(len(self.pool), self.pool.device)
        merge(self._rows, share, share, out)
        views = self.pool.layout.views(out)
        solved = set(self.layers(state))
        for entry in self.pool.layout.parameters:
            if entry.name in solved:
                experts = [row.view(entry.shape) for row in self._rows.span(entry.start, entry.stop)]
                merged = merge_layer(self._gram(state, entry.name), experts, ratio=self.ratio, ridge=self.ridge)
                views[entry.name].copy_(merged)

    def layers(self, state: RegMeanState) -> tuple[str, ...]:
        """The weights that are solved for, those of which the experts have Gram matrices; the others are the mean."""
        shipped = [] if self.learns else [own.names(self._kind) for own in self._shipped.values()]
        measured = shipped or [set(own) for own in state.grams]
        if any(each != measured[0] for each in measured):
            odd = sorted(name for name in set().union(*measured) if any(name not in each for each in measured))
            raise CheckpointError(f"Some experts have no Gram matrix of '{odd[0]}'; measure '{self._kind}' again.")
        shapes = {entry.name: entry.shape for entry in self.pool.layout.parameters}
        return tuple(n for n in shapes if n in measured[0] and (self.convolutions or len(shapes[n]) == 2))

    def _gram(self, state: RegMeanState, name: str) -> list[Tensor]:
        """Every expert's Gram matrix [groups,in,in] of one layer."""
        if self.learns:
            return [own[name].mean for own in state.grams]
        shape = next(entry.shape for entry in self.pool.layout.parameters if entry.name == name)
        key = f"{self._kind}/{name}"
        return [_checked(own.tensors[key], f"'{name}' of '{k}'", shape) for k, own in self._shipped.items()]


def _checked(gram: Tensor, what: str, shape: torch.Size) -> Tensor:
    square = gram.ndim == 3 and gram.shape[1] == gram.shape[2]
    if not square or gram.shape[0] * gram.shape[2] * (shape[0] // max(1, gram.shape[0])) != shape.numel():
        raise CheckpointError(
            f"The Gram matrix of {what} has shape {tuple(gram.shape)}, which does not fit a weight of shape "
            f"{tuple(shape)}. Measure it again."
        )
    if not bool(torch.isfinite(gram).all()):
        raise CheckpointError(f"The Gram matrix of {what} holds NaN or Inf. Measure it again.")
    return gram
