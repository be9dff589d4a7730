"""A last layer that is fitted to the experts' answers on the stream by ridge regression: a unit with its own state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mergestream.functional import head_fit
from mergestream.methods.fading_window import FadingWindow
from mergestream.methods.state import OF_ALL_EXPERTS, State
from mergestream.networks.layers import LastLayer


@dataclass(frozen=True)
class FitState(State):
    """Sums over a stream's images, and the layer that was fitted to them last."""

    # Mean input of the layer on the first batch [D]; sums about it lose no digits.
    centre: Tensor = field(metadata=OF_ALL_EXPERTS)
    sums: Tensor = field(metadata=OF_ALL_EXPERTS)  # over images that fade [1+D,1+D+C]
    change: Tensor = field(metadata=OF_ALL_EXPERTS)  # of the merged layer's weight [C,D]
    bias: Tensor = field(metadata=OF_ALL_EXPERTS)  # [C]


class FittedHead:
    """The unit's functions. For `before` images the merged layer itself counts in the fit."""

    def __init__(self, layer: LastLayer, before: float, device: torch.device) -> None:
        self._layer, self._before, self._device = layer, before, device

    def start(self) -> FitState:
        classes, inputs = self._layer.shape
        shapes = ((inputs,), (1 + inputs, 1 + inputs + classes), (classes, inputs), (classes,))
        return FitState(*(torch.zeros(shape, device=self._device) for shape in shapes))

    def learn(self, state: FitState, inputs: Tensor, targets: Tensor, window: FadingWindow) -> FitState:
        """Add a batch: the layer's inputs [B,D], and the experts' common answer [B,C]."""
        first = state.sums[0, 0] == 0
        centre = torch.where(first, (inputs * window.shares[:, None]).sum(dim=0), state.centre)
        means = head_fit.sums(inputs - centre, targets, window.shares)
        return replace(state, centre=centre, sums=window.add(state.sums, means))

    def answer(self, state: FitState, weights: Tensor, inputs: Tensor) -> tuple[Tensor, FitState]:
        """Logits [B,C] of a merged model with flat weights [P], its last layer fitted anew."""
        start, own = self._layer.of_weights(weights)
        about_centre = own + start @ state.centre
        change, bias = head_fit.fitted(state.sums, start, about_centre, self._before, state.change)
        weight = start + change
        logits = (inputs - state.centre) @ weight.T + bias
        return logits, replace(state, change=change, bias=bias - weight @ state.centre)

    def layer(self, state: FitState, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Weight [C,D] and bias [C] that answered last, of a merged model with flat weights [P]."""
        return self._layer.of_weights(weights)[0] + state.change, state.bias
