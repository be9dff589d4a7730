"""TENT (Wang et al. 2021) on the mean of the experts: one step of SGD on each batch's entropy."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mergestream.methods.adapted_norms import AdaptedNorms, AdaptedState


@dataclass(kw_only=True, eq=False, repr=False)
class Tent(AdaptedNorms):
    """The options are the paper's by default. The batch is answered with the adapted weights."""

    name: ClassVar[str] = "tent"

    def adapted(self, images: Tensor, state: AdaptedState) -> AdaptedState:
        return self.descended(state, self.slope(images, state.change).gradient)
