"""The mix of classes that a stream has, followed batch by batch from a model's own answers: docs/prior_adaptive.md."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mergestream.functional import class_mix
from mergestream.methods.fading import FadingWindow
from mergestream.methods.state import OF_ALL_EXPERTS, State

# What a stream is thought to be before its first batch: so many batches, whose mixes have this concentration.
BATCHES_BEFORE, CONCENTRATION_BEFORE = 4.0, 100.0
MORE_THAN_ONE = 1.5  # images


@dataclass(frozen=True)
class ClassPriorState(State):
    counts: Tensor  # the model's mean probabilities, summed over images that fade [C]
    images: Tensor  # how many those are []
    clumped: Tensor  # how clumped batches were, summed over batches that fade []
    clumps: Tensor  # how many those are []
    shift: Tensor  # of the log-odds of the last batch [C]
    untilted: Tensor | None = field(
        default=None, metadata=OF_ALL_EXPERTS
    )  # counts with the loss's class weights taken off [C]


class ClassPrior:
    """The unit's functions.

    home            the mix of classes that experts answer with at home [C]
    untilted_home   the same once the class weights of their losses are taken off [C]
    tilt            log-odds that those weights took from the classes [C]; None where there are none
    anchor          how far the long-run mix is taken back to the home: 0 not at all, 1 wholly
    before          how many images of the home mix the long run starts with
    """

    def __init__(self, home: Tensor, untilted_home: Tensor, tilt: Tensor | None, anchor: float, before: float) -> None:
        self.home, self.untilted_home, self.tilt = home, untilted_home, tilt
        self._anchor, self._before = anchor, before

    def start(self) -> ClassPriorState:
        classes, nothing = torch.zeros_like(self.home), torch.zeros((), device=self.home.device)
        return ClassPriorState(
            classes, nothing, nothing, nothing, classes, untilted=None if self.tilt is None else classes
        )

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
        assumed = class_mix.as_mix(counts + self._before * self.home)
        expected = class_mix.between(assumed, self._at_home(assumed, untilted), self._anchor)
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
        usual = class_mix.as_mix(untilted + self._before * self.untilted_home)
        return class_mix.as_mix(assumed * self.untilted_home / usual)
