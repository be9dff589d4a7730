"""The last layer of a merged model as a discriminant that is fitted to the stream: a unit with its own state."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mergestream.functional import head_fit
from mergestream.functional.discriminant import discriminant
from mergestream.methods.fading_window import FadingWindow
from mergestream.methods.state import OF_ALL_EXPERTS, State


@dataclass(frozen=True)
class DiscriminantState(State):
    """Sums over a stream's images, and the layer that was fitted to them last."""

    # Mean feature of the first batch [D]; sums about it lose no digits.
    centre: Tensor = field(metadata=OF_ALL_EXPERTS)
    sums: Tensor = field(metadata=OF_ALL_EXPERTS)  # over images that fade [1+D,1+D+C]
    weight: Tensor = field(metadata=OF_ALL_EXPERTS)  # [C,D]
    bias: Tensor = field(metadata=OF_ALL_EXPERTS)  # about the centre [C]


@dataclass(frozen=True)
class DiscriminantHead:
    """Every class is a Gaussian in the space of features; labels are soft."""

    features: int
    classes: int
    device: torch.device

    def start(self) -> DiscriminantState:
        d, c = self.features, self.classes
        shapes = ((d,), (1 + d, 1 + d + c), (c, d), (c,))
        return DiscriminantState(*(torch.zeros(shape, device=self.device) for shape in shapes))

    def learn(
        self, state: DiscriminantState, features: Tensor, labels: Tensor, window: FadingWindow
    ) -> DiscriminantState:
        """Add a batch's features [B,D] with soft labels [B,C], and fit the layer anew."""
        centre = torch.where(state.sums[0, 0] == 0, (features * window.shares[:, None]).sum(dim=0), state.centre)
        sums = window.add(state.sums, head_fit.sums(features - centre, labels, window.shares))
        return DiscriminantState(centre, sums, *discriminant(sums, state.weight))

    def logits(self, state: DiscriminantState, features: Tensor) -> Tensor:
        """Log-posteriors [B,C] of features [B,D]."""
        return torch.log_softmax((features - state.centre) @ state.weight.T + state.bias, dim=-1)

    def distance(self, state: DiscriminantState, features: Tensor) -> Tensor:
        """Squared distances [B] of features [B,D] from the stream's mean, in units of the stream's own."""
        images, squares = state.sums[0, 0].clamp_min(1.0), state.sums.diagonal()[1 : 1 + self.features]
        middle = state.sums[0, 1 : 1 + self.features] / images
        usual = squares.sum() / images - middle.square().sum()
        return (features - (state.centre + middle)).square().sum(dim=1) / usual.clamp_min(head_fit.TINY)
