"""Merge the encoders once, fit the head to the stream, and follow the classes' mix: docs/merge_and_fit.md."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from mergestream.networks.layers import batchnorm_layers
from mergestream.networks.preprocessing import ORIGINAL, view_names
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import NetworkError
from mergestream.runtime.messages import log_once
from mergestream.runtime.option_checks import number, whole_number, yes_or_no

_log = logging.getLogger(__name__)
RECENT_IMAGES = 256.0  # over so many images distances fade to 1/e
DOUBT = 0.01  # probability that a voice knows nothing about an image: so none decides alone, however certain


def voice(logits: Tensor) -> Tensor:
    """Log-answers [...,C] of one voice, mixed with a doubt."""
    return torch.log(torch.softmax(logits, dim=-1) * (1 - DOUBT) + DOUBT / logits.shape[-1])


def together(voices: Tensor) -> Tensor:
    """Answers [B,C] of several voices [V,B,C], each of which counts once."""
    return torch.softmax(voices.mean(dim=0), dim=-1)


@dataclass(frozen=True)
class DistanceState(State):
    """How far the last images were from those that the head was fitted to."""

    total: Tensor  # squared distances in units of the usual one, summed over images that fade []
    images: Tensor  # how many []

    def add(self, distance: Tensor, images: Tensor) -> DistanceState:
        """The mean squared distance [] of so many images []."""
        left = torch.exp(-images / RECENT_IMAGES)
        return DistanceState(left * self.total + images * distance, left * self.images + images)

    def mean(self) -> Tensor:
        """The mean [], of which the usual one is 1."""
        return self.total / self.images.clamp_min(1.0)


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
    """Experts, their merged model, and a head that learns from both on the stream: each has one voice.

    Where experts and merged model agree, they label the stream well: their mean answer, corrected for the classes'
    mix, is what the head learns. It answers an image before it learns from it. All voices together are corrected
    likewise. Where the experts are not asked, merged model and head answer alone.
    """

    name: ClassVar[str] = "merge_and_fit"
    revision: ClassVar[int] = 2
    asks_experts = True
    views: Sequence[str] = option(("hflip",), view_names)  # label-preserving; the experts answer them too
    temperature: float | Sequence[float] | str = 1.0  # of the experts' answers: one, one per expert, or each card's
    memory: float = option(4096, number, low=1)  # over how many images the past fades to 1/e
    correct: bool = option(True, yes_or_no)  # for the mix of classes in the stream
    ask_first: int = option(512, whole_number, low=1)  # images that the experts answer at the start, ...
    ask_every: int = option(1, whole_number, low=0)  # ... then those of every n-th batch; 0: none
    # Start over when features are further from the stream's mean than usual, by this share; 0: never.
    ask_drift: float = option(0.0, number, low=0)
    batch_bias: float = option(Correction.batch_bias, number, low=0, later=True)  # of the correction, in nats

    def __post_init__(self) -> None:
        super().__post_init__()
        pool, self.capturable = self.pool, True
        self._always = self.ask_every == 1
        self._temperature, self._seen = resolve_temperature(self.temperature, pool), SeenClasses.of(pool)
        self._coefficients = simplex.uniform(len(pool), pool.device)
        home = class_mix.as_mix(resolve_home("card", pool)).to(pool.device)
        self._correction = Correction(LongRun(home, variance_between_sites(pool), 0.0), self.batch_bias)
        # Averaged BatchNorm statistics do not describe the merged model: it has no say then.
        self._merged_speaks = not batchnorm_layers(pool.template.module)
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
        none = torch.zeros((), device=self.pool.device)
        distance = DistanceState(none, none) if self.ask_drift and not self._always else None
        return MergeAndFitState(0, 0, correction, correction.long_run, head, distance)

    def alarm(self, state: MergeAndFitState) -> Tensor | None:
        return None if state.distance is None else state.distance.mean()

    def before_step(self, state: MergeAndFitState, alarm: float | None = None) -> MergeAndFitState:
        """Ask again, and fit a new head, where images have come that are unlike those of the fit.

        What is known about the classes' mix stays: an unusual mix of classes, too, moves features.
        """
        if state.distance is None or not self._is_over(state):
            return state
        alarm = float(state.distance.mean()) if alarm is None else alarm
        if alarm - 1 <= self.ask_drift:
            return state
        new = self.start()
        return replace(state, asked=0, head=new.head, distance=new.distance)

    def phase(self, state: MergeAndFitState) -> Hashable | None:
        return (self._asks(state),) if self._always or self._is_over(state) else None

    def advance(self, batch: Batch, state: MergeAndFitState) -> tuple[Step, MergeAndFitState]:
        state = state if self.pool.is_recording else self.before_step(state)
        asks, window = self._asks(state), FadingWindow.of(batch, self.memory)
        answer = partial(self._merged_model, batch, state)
        (merged, features), own = (
            self.pool.side_by_side(answer, partial(self._experts, batch)) if asks else (answer(), ())
        )
        logits = [*own, *([merged] if self._merged_speaks else [])]
        without_head = len(logits)
        if self._head is not None and state.head is not None and features is not None:
            logits.append(self._head.logits(state.head, features))  # before it learns from these images
        voices = voice(torch.stack(logits))
        common = together(voices[:without_head]) if asks else None
        (answers, labels, after), distance = self.pool.side_by_side(
            partial(self._corrected, common, together(voices), state, window),
            partial(self._distance, state, None if asks else features, window),
        )
        state = self._learnt(replace(after, distance=distance), features, labels, window)
        asked = state.asked if self._always or not asks else min(self.ask_first, state.asked + len(batch.images))
        step = Step(answers.clamp_min(TINY).log(), self._coefficients.clone())
        return step, replace(state, batches=state.batches + 1, asked=asked)

    def _is_over(self, state: MergeAndFitState) -> bool:
        """Whether the images that the experts answer at the start have passed."""
        return state.asked >= self.ask_first

    def _asks(self, state: MergeAndFitState) -> bool:
        """Whether the experts answer the next batch."""
        in_turn = self.ask_every > 0 and state.batches % self.ask_every == 0
        return self._always or in_turn or not self._is_over(state)

    def _experts(self, batch: Batch) -> Tensor:
        """Each expert's logits [K,B,C], averaged over views.

        About a class that an expert never saw, it says what the others say.
        """
        views = (ORIGINAL, *self.views)
        by_view = self.pool.logits_of_views(batch, views)
        logits = torch.stack([by_view[view].float() for view in views]).mean(dim=0)
        return self._seen.filled(logits / self._temperature[:, None, None])

    def _merged_model(self, batch: Batch, state: MergeAndFitState) -> tuple[Tensor, Tensor | None]:
        """The merged model's logits [B,C], and its features [B,D] unless no head can be fitted to them."""
        weights = self.merged(state)
        if self._head is not None and state.head is not None:
            try:
                return self.pool.forward_with_inputs(weights, batch.images)
            except NetworkError as error:
                self._answer_without_a_head(str(error))
        return self.pool.forward(weights, batch.images), None

    def _corrected(
        self, common: Tensor | None, answers: Tensor, state: MergeAndFitState, window: FadingWindow
    ) -> tuple[Tensor, Tensor | None, MergeAndFitState]:
        """The final answers [B,C], labels for the head [B,C], and the state after them.

        How alike the classes of a batch are is judged without the head: having learnt from such batches, it answers
        their images alike. Only where the experts are not asked, all voices judge.
        """
        if not self.correct:
            return answers, common, state
        correct, before = partial(self._correction.correct_all, fused=self.pool.is_recording), state.mix
        if common is None:
            (corrected,), own, mix = correct(replace(before, long_run=state.answers), answers, None, None, window)
            return corrected, None, replace(state, mix=replace(mix, long_run=before.long_run), answers=own)
        (labels, corrected), own, mix = correct(before, common, None, (state.answers, answers), window)
        return corrected, labels, replace(state, mix=mix, answers=own)

    def _learnt(
        self, state: MergeAndFitState, features: Tensor | None, labels: Tensor | None, window: FadingWindow
    ) -> MergeAndFitState:
        """The state after the head has learnt from labels [B,C], where there are any."""
        if self._head is None or state.head is None or features is None or labels is None:
            return state
        return replace(state, head=self._head.learn(state.head, features, labels, window))

    def _distance(self, state: MergeAndFitState, features: Tensor | None, window: FadingWindow) -> DistanceState | None:
        """How far images were from those that the head knows, with features [B,D] that it does not learn from."""
        if self._head is None or state.head is None or features is None or state.distance is None:
            return state.distance
        return state.distance.add(self._head.distance(state.head, features) @ window.shares, window.images)

    @property
    def reuses_weights(self) -> bool:
        return True

    def merge_into(self, state: MergeAndFitState, out: Tensor) -> None:
        self.pool.merge(self._coefficients, out=out)

    def weights(self, state: MergeAndFitState) -> Tensor:
        """A copy of the merged model's weights [P] whose last layer is the mean of its own and the fitted head."""
        weights, last, head = self.merged(state).clone(), self.pool.last_layer, state.head
        if last is not None and head is not None:
            weight, bias = head.weight, head.bias - head.weight @ head.centre
            if self._merged_speaks:
                own = last.of_weights(weights)
                weight, bias = (weight + own[0]) / 2, (bias + own[1]) / 2
            last.write(weights, weight, bias)
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
