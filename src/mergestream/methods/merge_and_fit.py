"""Merge the encoders once, fit the head to the stream, and follow the classes' mix: docs/merge_and_fit.md."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream.functional import class_mix
from mergestream.functional import coefficients as simplex
from mergestream.functional.neighbours import TINY
from mergestream.methods.base import Method, option
from mergestream.methods.card_values import resolve_home, resolve_temperature, variance_between_sites
from mergestream.methods.correction import Correction, CorrectionState, LongRun, LongRunState
from mergestream.methods.discriminant_head import DiscriminantHead, DiscriminantState
from mergestream.methods.fading_window import FadingWindow
from mergestream.methods.seen_classes import SeenClasses
from mergestream.methods.state import State, Step
from mergestream.networks.preprocessing import ORIGINAL, view_names
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import NetworkError
from mergestream.runtime.messages import log_once
from mergestream.runtime.option_checks import number, whole_number, yes_or_no

_log = logging.getLogger(__name__)
RECENT_IMAGES = 256.0  # over so many images distances fade to 1/e


@dataclass(frozen=True)
class DistanceState(State):
    """How far the last images were from those that the head was fitted to."""

    total: Tensor  # squared distances in units of the usual one, summed over images that fade []
    images: Tensor  # how many []

    @classmethod
    def start(cls, device: torch.device) -> DistanceState:
        return cls(torch.zeros((), device=device), torch.zeros((), device=device))

    def add(self, distance: Tensor, images: Tensor) -> DistanceState:
        """The mean squared distance [] of so many images []."""
        left = torch.exp(-images / RECENT_IMAGES)
        return DistanceState(left * self.total + images * distance, left * self.images + images)

    def excess(self) -> float:
        """What the mean is above the usual one, as a share of it. Reads the device."""
        return float(self.total / self.images.clamp_min(1.0)) - 1


@dataclass(frozen=True)
class MergeAndFitState(State):
    batches: int
    asked: int  # images that the experts have answered since the start, or since the last alarm
    mix: CorrectionState = field(metadata={"prefix": "mix_"})  # what the stream says about its classes
    answers: LongRunState = field(metadata={"prefix": "answers_"})
    head: DiscriminantState | None = field(metadata={"prefix": "head_"})
    distance: DistanceState | None = field(metadata={"prefix": "distance_"})


@dataclass(kw_only=True, eq=False, repr=False)
class MergeAndFit(Method[MergeAndFitState]):
    """The experts' mean encoder, with a head that learns from the experts' answers on the stream.

    Experts that agree label the stream better than any of them: their calibrated answers are averaged, corrected for
    the classes' mix, and fitted by the head. Then the head answers too, as one voice more, and the answers are
    corrected likewise. Where the experts are not asked, the head answers alone.
    """

    name: ClassVar[str] = "merge_and_fit"
    asks_experts = True
    views: Sequence[str] = option(("hflip",), view_names)  # label-preserving; the experts answer them too
    temperature: float | Sequence[float] | str = "card"  # of the experts' answers: one, one per expert, or each card's
    memory: float = option(4096, number, low=1)  # over how many images the past fades to 1/e
    correct: bool = option(True, yes_or_no)  # for the mix of classes in the stream
    ask_first: int = option(512, whole_number, low=1)  # images that the experts answer at the start, ...
    ask_every: int = option(1, whole_number, low=0)  # ... then those of every n-th batch; 0: none
    # Start over when features are further from the stream's mean than usual, by this share; 0: never.
    ask_drift: float = option(0.0, number, low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        pool, self.capturable = self.pool, self.ask_every == 1
        self._always = self.ask_every == 1
        self._temperature, self._seen = resolve_temperature(self.temperature, pool), SeenClasses.of(pool)
        self._coefficients = simplex.uniform(len(pool), pool.device)
        home = class_mix.as_mix(resolve_home("card", pool)).to(pool.device)
        self._correction = Correction(LongRun(home, variance_between_sites(pool), 0.0))
        self._head: DiscriminantHead | None = None
        if pool.last_layer is not None:
            classes, features = pool.last_layer.shape
            self._head = DiscriminantHead(features, classes, pool.device)
        else:
            self._answer_without_a_head(f"{pool.template.architecture} does not end in one linear layer with a bias.")

    def _answer_without_a_head(self, reason: str) -> None:
        """Leave the answers to the experts alone, where that is possible."""
        if not self._always:
            raise NetworkError(f"'{self.name}' cannot answer without the experts: {reason}")
        log_once(_log, logging.WARNING, f"'{self.name}' fits no head, the experts answer alone: {reason}")
        self._head = None

    def start(self) -> MergeAndFitState:
        correction = self._correction.start(len(self.pool))
        head = None if self._head is None else self._head.start()
        distance = DistanceState.start(self.pool.device) if self.ask_drift and not self._always else None
        return MergeAndFitState(0, 0, correction, correction.long_run, head, distance)

    def advance(self, batch: Batch, state: MergeAndFitState) -> tuple[Step, MergeAndFitState]:
        asks, window = self._asks(state), FadingWindow.of(batch, self.memory)
        experts = self._experts(batch) if asks else None
        features = self._features(batch, state)
        mix, head, own, asked, distance = state.mix, state.head, None, state.asked, state.distance
        targets = experts
        if experts is not None and self.correct:
            targets, mix = self._correction.correct(mix, experts, None, window)
        if self._head is not None and head is not None and features is not None:
            head = head if targets is None else self._head.learn(head, features, targets, window)
            own = self._head.logits(head, features)
            if not asks and distance is not None:
                distance = distance.add(self._head.distance(head, features) @ window.shares, window.images)
        answers, mix, long_run = self._corrected(self._together(experts, own), mix, state.answers, window, asks)
        if not asks and distance is not None and self._head is not None and distance.excess() > self.ask_drift:
            # Another scanner or site: start over.
            head, distance, asked = self._head.start(), DistanceState.start(self.pool.device), 0
        asked += len(batch.images) if asks and not self._always else 0
        step = Step(answers.clamp_min(TINY).log(), self._coefficients.clone())
        return step, MergeAndFitState(state.batches + 1, asked, mix, long_run, head, distance)

    def _asks(self, state: MergeAndFitState) -> bool:
        """Whether the experts answer the next batch."""
        in_turn = self.ask_every > 0 and state.batches % self.ask_every == 0
        return self._always or in_turn or state.asked < self.ask_first

    def _experts(self, batch: Batch) -> Tensor:
        """The mean of the experts' calibrated answers [B,C]; an expert's logits are averaged over views first.

        About a class that an expert never saw, it says what the others say.
        """
        views = (ORIGINAL, *self.views)
        by_view = self.pool.logits_of_views(batch, views)
        logits = torch.stack([by_view[view].float() for view in views]).mean(dim=0)
        calibrated = self._seen.filled(logits / self._temperature[:, None, None])
        return torch.softmax(calibrated, dim=-1).mean(dim=0)

    def _features(self, batch: Batch, state: MergeAndFitState) -> Tensor | None:
        """The merged encoder's features [B,D]; None where no head can be fitted."""
        if self._head is None or state.head is None:
            return None
        try:
            return self.pool.forward_with_inputs(self.merged(state), batch.images)[1]
        except NetworkError as error:
            self._answer_without_a_head(str(error))
            return None

    def _together(self, experts: Tensor | None, own: Tensor | None) -> Tensor:
        """Answers [B,C] of the experts, of the head (its log-probabilities), or of both: it is one voice more."""
        if own is None:
            assert experts is not None
            return experts
        if experts is None:
            return own.exp()
        return torch.softmax(torch.lerp(experts.clamp_min(TINY).log(), own, 1 / (1 + len(self.pool))), dim=-1)

    def _corrected(
        self, answers: Tensor, mix: CorrectionState, long_run: LongRunState, window: FadingWindow, asks: bool
    ) -> tuple[Tensor, CorrectionState, LongRunState]:
        """The final answers [B,C], and what is known about the mix of classes and about such answers after them.

        A head that has just learnt from a batch answers its images alike, whatever their classes. So while the experts
        are asked, their answers alone say how alike the classes of a batch are.
        """
        if not self.correct:
            return answers, mix, long_run
        if asks:
            long_run = self._correction.long_run.learn(long_run, answers, None, window)
            return self._correction.apply(mix, long_run, answers, window), mix, long_run
        corrected, after = self._correction.correct(replace(mix, long_run=long_run), answers, None, window)
        return corrected, replace(after, long_run=mix.long_run), after.long_run

    def merge_into(self, state: MergeAndFitState, out: Tensor) -> None:
        self.pool.merge(self._coefficients, out=out)

    def weights(self, state: MergeAndFitState) -> Tensor:
        """The merged model's weights [P] with the head that was fitted last: a copy."""
        weights, last = self.merged(state).clone(), self.pool.last_layer
        if last is not None and state.head is not None:
            last.write(weights, state.head.weight, state.head.bias - state.head.weight @ state.head.centre)
        return weights

    def card_values(self) -> dict[str, Any]:
        values = {"home": self._correction.long_run.home.tolist()} if self.correct else {}
        return {**values, "temperature": self._temperature.tolist(), **self._seen.card_values()}


@dataclass(kw_only=True, eq=False, repr=False)
class MergeOnce(MergeAndFit):
    """`merge_and_fit` at the cost of one model: the experts answer the first images, then the head answers alone.

    When images come that are unlike those it was fitted to, the experts are asked again.
    """

    name: ClassVar[str] = "merge_once"
    ask_every: int = option(0, whole_number, low=0)
    ask_drift: float = option(0.2, number, low=0)
