"""SAR (Niu et al. 2023) on the mean of the experts: TENT on reliable images, towards flat places of the loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mergestream.methods.adapted_norms import AdaptedNorms, AdaptedState
from mergestream.methods.base import option
from mergestream.networks.blocks import find_blocks
from mergestream.runtime.errors import NetworkError
from mergestream.runtime.option_checks import number, whole_number

SMALL = 1e-12
KEEP = 0.9  # share of the old moving loss


@dataclass(kw_only=True, eq=False, repr=False)
class Sar(AdaptedNorms):
    """The options are the paper's by default. The batch is answered with the adapted weights."""

    name: ClassVar[str] = "sar"
    margin: float = option(0.4, number, above=0)  # an image counts if its entropy is below this share of ln C
    radius: float = option(0.05, number, low=0)  # rho: how far the gradient is taken from the present weights
    reset_below: float = option(0.2, number, low=0)  # the model starts anew when the moving loss falls below this
    frozen_blocks: int = option(3, whole_number, low=0)  # last blocks, and what follows them, that are not adapted

    def frozen(self, names: Sequence[str]) -> set[str]:
        """At most all blocks but the first; none in a network whose blocks are not known."""
        try:
            blocks = find_blocks(self.pool.template.module)
        except NetworkError:
            return set()
        count = min(self.frozen_blocks, len(blocks) - 1)
        if not count:
            return set()
        inside = [any(name.startswith(f"{block}.") for block in blocks) for name in names]
        last = max((place for place, within in enumerate(inside) if within), default=-1)
        prefixes = tuple(f"{block}." for block in blocks[-count:])
        return {name for place, name in enumerate(names) if place > last or name.startswith(prefixes)}

    def adapted(self, images: Tensor, state: AdaptedState) -> AdaptedState:
        limit = self.margin * math.log(len(self.pool.classes))
        first = self.slope(images, state.change, below=limit)
        uphill = self.radius * first.gradient / (first.gradient.norm() + SMALL)
        second = self.slope(images, state.change + uphill, below=limit, among=first.counted)
        state = self.descended(state, second.gradient)
        moving = torch.where(state.loss < 0, second.loss, KEEP * state.loss + (1 - KEEP) * second.loss)
        moving = torch.where(second.counted.any(), moving, state.loss)
        return self._renewed(replace(state, loss=moving))

    def _renewed(self, state: AdaptedState) -> AdaptedState:
        """The mean again where the moving loss says that the model has collapsed to one answer."""
        collapsed, start = (state.loss >= 0) & (state.loss < self.reset_below), self.start()
        change = torch.where(collapsed, start.change, state.change)
        velocity = torch.where(collapsed, start.velocity, state.velocity)
        return AdaptedState(change, velocity, torch.where(collapsed, start.loss, state.loss))
