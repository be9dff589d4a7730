"""The units that `prior_adaptive` combines, each with its own state. The equations: docs/prior_adaptive.md."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mergestream.functional import class_mix, head_fit
from mergestream.methods.state import OF_ALL_EXPERTS, PER_EXPERT, State
from mergestream.networks.layers import LastLayer
from mergestream.pool.runner import Batch

# What a stream is thought to be before its first batch: so many batches, whose mixes have this concentration.
BATCHES_BEFORE, CONCENTRATION_BEFORE = 4.0, 100.0
MORE_THAN_ONE = 1.5  # images


@dataclass(frozen=True)
class FadingWindow:
    """How a batch counts in such sums."""

    shares: Tensor  # what each image counts in a mean over the batch [B]
    images: Tensor  # how many images that are []
    faded: Tensor  # what is left of older sums []

    @classmethod
    def of(cls, batch: Batch, memory: float) -> FadingWindow:
        """`memory`: over how many images a sum fades to 1/e."""
        shares = class_mix.counted(batch.shares, batch.images)
        images = 1 / (shares**2).sum()
        return cls(shares, images, torch.exp(-images / memory))

    def add(self, sums: Tensor, means: Tensor) -> Tensor:
        """Older sums, faded, and the batch's, of which means over its images are given."""
        return self.faded * sums + self.images * means


@dataclass(frozen=True)
class ScaleState(State):
    """Moments of logits, summed over images that fade, and the scale that answered last."""

    own_moments: Tensor  # of the merged model's [1,C+2]
    scale: Tensor  # []
    expert_moments: Tensor = field(metadata=PER_EXPERT)  # of each expert's, over the same images [K,C+2]


class ScaleMatch:
    """The unit's functions; `temperature` [K] is what each expert's logits are divided by."""

    def __init__(self, temperature: Tensor, classes: int) -> None:
        self._temperature, self._width = temperature, classes + 2

    def start(self) -> ScaleState:
        device = self._temperature.device
        moments = torch.zeros(1, self._width, device=device)
        return ScaleState(moments, torch.ones((), device=device), moments.repeat(len(self._temperature), 1))

    def matched(
        self, state: ScaleState, logits: Tensor, expert_logits: Tensor | None, window: FadingWindow
    ) -> tuple[Tensor, ScaleState]:
        """Logits [B,C] at the experts' scale; moments are added where the experts' logits [K,B,C] are there."""
        if expert_logits is not None:
            calibrated = expert_logits.float() / self._temperature[:, None, None]
            state = replace(
                state,
                own_moments=window.add(state.own_moments, class_mix.moments(logits[None], window.shares)),
                expert_moments=window.add(state.expert_moments, class_mix.moments(calibrated, window.shares)),
            )
        scale = class_mix.scale_between(state.own_moments, state.expert_moments)
        return logits * scale, replace(state, scale=scale)


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


def common_answer(views: Tensor, coefficients: Tensor) -> Tensor:
    """The experts' answer to a batch [B,C]: logits [V,K,B,C], the mean over views, weighed by coefficients [K]."""
    return (coefficients[:, None, None] * views.mean(dim=0)).sum(dim=0)


@dataclass(frozen=True)
class ClassPriorState(State):
    counts: Tensor  # the model's mean probabilities, summed over images that fade [C]
    images: Tensor  # how many those are []
    clumped: Tensor  # how clumped batches were, summed over batches that fade []
    clumps: Tensor  # how many those are []
    shift: Tensor  # of the log-odds of the last batch [C]
    # Counts with the loss's class weights taken off [C].
    untilted: Tensor | None = field(default=None, metadata=OF_ALL_EXPERTS)


@dataclass(frozen=True)
class ClassPrior:
    """The unit's functions."""

    home: Tensor  # the mix of classes that experts answer with at home [C]
    untilted_home: Tensor  # the same once the class weights of their losses are taken off [C]
    tilt: Tensor | None  # log-odds that those weights took from the classes [C]; None where there are none
    anchor: float  # how far the long-run mix is taken back to the home: 0 not at all, 1 wholly
    before: float  # how many images of the home mix the long run starts with

    def start(self) -> ClassPriorState:
        classes, nothing = torch.zeros_like(self.home), torch.zeros((), device=self.home.device)
        return ClassPriorState(classes, nothing, nothing, nothing, classes, None if self.tilt is None else classes)

    def follow(self, state: ClassPriorState, logits: Tensor, window: FadingWindow) -> ClassPriorState:
        """Learn from a batch's logits [B,C]; the state after it holds the shift of its log-odds."""
        probabilities, shares = torch.softmax(logits, dim=-1), window.shares
        tells = (state.images > 0) & (window.images > MORE_THAN_ONE)  # the first batch has nothing to depart from
        usual = class_mix.as_mix(torch.where(state.images > 0, state.counts, self.home))
        departure = torch.where(tells, class_mix.clumped(probabilities, usual, shares), 0.0)
        clumped, clumps = window.faded * state.clumped + departure, window.faded * state.clumps + tells
        counts = window.add(state.counts, (probabilities * shares[:, None]).sum(dim=0))
        untilted = state.untilted
        if self.tilt is not None and untilted is not None:
            without = torch.softmax(logits + self.tilt, dim=-1)
            untilted = window.add(untilted, (without * shares[:, None]).sum(dim=0))
        images = window.faded * state.images + window.images
        assumed = class_mix.as_mix(counts + self.before * self.home)
        expected = class_mix.between(assumed, self._at_home(assumed, untilted), self.anchor)
        before = BATCHES_BEFORE / (1 + CONCENTRATION_BEFORE)
        concentration = class_mix.concentration((clumped + before) / (clumps + BATCHES_BEFORE))
        mix = class_mix.mix_of_batch(probabilities, assumed, expected, concentration, shares)
        return ClassPriorState(counts, images, clumped, clumps, mix.log() - assumed.log(), untilted)

    def _at_home(self, assumed: Tensor, untilted: Tensor | None) -> Tensor:
        """The mix [C] that the model would answer with in the long run if the classes were mixed as at home.

        A weighted loss makes the mean answer move towards even shares the less a model knows, so it can be compared
        with home only once the weights are taken off; the ratio found there holds for the answers as they are.
        """
        if untilted is None:
            return self.home
        usual = class_mix.as_mix(untilted + self.before * self.untilted_home)
        return class_mix.as_mix(assumed * self.untilted_home / usual)
