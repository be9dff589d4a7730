"""Fisher merging (Matena and Raffel 2022): every number is weighed by each expert's Fisher information about it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.functional.merging import fisher_average, merge, weighted_sum
from mergestream.methods.base import option
from mergestream.methods.merged_model import MergedState, StatisticsModel
from mergestream.methods.state import INSEPARABLE
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics.fisher_information import FISHERS, fisher_information
from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.option_checks import number, one_of, whole_number, yes_or_no

# MergeLM's and FusionBench's: added to every norm before it divides.
NORM_FLOOR = 1e-6


@dataclass(frozen=True)
class FisherState(MergedState):
    seen: int  # images of the target
    # Of each expert [P], the mean over these images; empty before the first.
    information: list[Tensor] = field(metadata=INSEPARABLE)


@dataclass(kw_only=True, eq=False, repr=False)
class Fisher(StatisticsModel[FisherState]):
    """`fisher` is 'exact', sum_c p_c (d log p_c)^2 of every example, or 'mergelm', as published: one per batch."""

    name: ClassVar[str] = "fisher"
    fisher: str = option("exact", one_of, tuple(FISHERS))
    statistics: str = option("source", one_of, ("source", "target"))
    examples: int = option(500, whole_number, low=1)
    normalise: bool = option(True, yes_or_no)  # by its size, so that no expert outweighs others by its scale alone
    floor: float = option(1e-6, number, above=0)  # least information of any number; where no expert has more: the mean

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learns:
            self.needs = ("gradients",)

    def start_learning(self) -> FisherState:
        return FisherState(0, [])

    def _kind_for(self, pool: ExpertPool) -> str:
        return f"fisher_{self.fisher}"

    def learn(self, images: Tensor, state: FisherState) -> FisherState:
        if state.seen >= self.examples:
            return state
        rows = [
            self._flat(fisher_information(self.pool, k, images, self.fisher), f"Expert '{name}'") / len(images)
            for k, name in enumerate(self.pool.names)
        ]
        seen = state.seen + len(images)
        old, share = state.information or rows, len(images) / seen
        information = [torch.lerp(mine, new, share) for mine, new in zip(old, rows, strict=True)]
        return replace(state, seen=seen, information=information)

    def merge_parameters(self, state: FisherState, out: Tensor) -> None:
        rows, share = self._rows, simplex.uniform(len(self._rows), out.device)
        information = state.information
        if not self.learns:
            owner = "The Fisher information of '{}'"
            information = [self._flat(dict(s.of(self._kind)), owner.format(k)) for k, s in self._shipped.items()]
        if not information:  # no batch of the target yet: the mean
            merge(rows, share, share, out)
            return
        norms = [float(row.double().norm()) for row in information]
        published = self.fisher == "mergelm"
        scales = [1.0] * len(norms)
        if self.normalise and published:
            scales = [1 / (norm + NORM_FLOOR) for norm in norms]
        elif self.normalise:
            # By the root mean square, not the norm: the floor then means the same for networks of any size.
            root = math.sqrt(sum(entry.stop - entry.start for entry in self.pool.layout.parameters))
            # An expert that is certain of every image has no information at all: its floor decides.
            scales = [min(root / norm, 1e30) if norm > 0 else 1.0 for norm in norms]
        fisher_average(rows, information, scales, floor=self.floor, added=published, out=out)
        for entry in self.pool.layout.parameters:
            place = slice(entry.start, entry.stop)
            if not any(bool(row[place].any()) for row in information):  # no answer depends on it: the mean
                weighted_sum(rows.span(entry.start, entry.stop), share, out[place])

    def _flat(self, tensors: Mapping[str, Tensor], owner: str) -> Tensor:
        """By parameter name -> [P], zero for buffers and padding."""
        row = torch.zeros(self.pool.layout.size, device=self.pool.device)
        entries = {entry.name: entry for entry in self.pool.layout.parameters}
        if set(tensors) != set(entries):
            odd = sorted(set(tensors) ^ set(entries))
            raise CheckpointError(f"{owner} is not of this network's parameters: {', '.join(odd[:3])} …")
        for name, tensor in tensors.items():
            entry = entries[name]
            if tensor.shape != entry.shape or not bool(torch.isfinite(tensor).all()) or bool((tensor < 0).any()):
                if self.learns:
                    raise InputError(f"{owner} has gradients of NaN or Inf at '{name}' on this batch.")
                raise CheckpointError(
                    f"{owner}: '{name}' must be finite, at least 0 and shaped {tuple(entry.shape)}; measure it again."
                )
            row[entry.start : entry.stop] = tensor.flatten().to(row)
        return row
