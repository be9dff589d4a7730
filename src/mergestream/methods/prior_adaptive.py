"""Entropy-adaptive merging with a head that is fitted to the stream and its mix of classes: docs/prior_adaptive.md."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream.functional import class_mix, head_fit, merging
from mergestream.methods import prior_units as units
from mergestream.methods.base import Method, option
from mergestream.methods.card_values import resolve_home, resolve_temperature, resolve_tilt, resolve_untilted_home
from mergestream.methods.entropy_adaptive import EntropyAdaptive
from mergestream.methods.entropy_options import EntropyState
from mergestream.methods.expert_rows import even_heads, restored
from mergestream.methods.seen_classes import SeenClasses
from mergestream.methods.state import PART, State, Step
from mergestream.networks.layers import class_entries
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import NetworkError
from mergestream.runtime.messages import log_once
from mergestream.runtime.option_checks import number, yes_or_no

_log = logging.getLogger(__name__)
SHARED_OPTIONS = (
    "encoder", "head", "head_sharpness", "momentum", "score", "views", "recalibrate_bn", "refresh_every",
)  # fmt: skip


@dataclass(frozen=True)
class PriorState(State):
    rule: EntropyState = field(metadata=PART)
    prior: units.ClassPriorState = field(metadata=PART)
    scale: units.ScaleState | None = field(metadata=PART)
    fit: units.FitState | None = field(metadata={"prefix": "fit_"})


@dataclass(kw_only=True, eq=False, repr=False)
class PriorAdaptive(Method[PriorState]):
    """Coefficients by entropy, as the paper's; the head says what the experts say, its bias follows the classes' mix.

    Heads that started apart have no useful mean, so the last layer is fitted to the experts' answers. A merged model on
    a foreign site prefers some classes: its answers in the long run are compared with those of experts at home, and
    each batch with the long run; how far a batch may depart is learnt from the batches themselves.
    """

    name: ClassVar[str] = "prior_adaptive"
    revision: ClassVar[int] = 3
    capturable = True
    asks_experts = True
    # As of entropy_adaptive, which checks them.
    temperature: float | Sequence[float] | str = "card"
    encoder: str = "adaptive"
    head: str = "shared"
    head_sharpness: float = 1.0
    momentum: float = 0.0
    score: str = "entropy_agreement"  # which doubts an expert that is certain and alone
    views: Sequence[str] = ("hflip",)
    recalibrate_bn: bool = option(False, yes_or_no)
    refresh_every: int = 1
    # How far the long-run mix is taken back to the experts' home: 0 not at all, 1 wholly.
    anchor: float = option(1.0, number, low=0, high=1)
    home: str | Sequence[float] = "card"  # that mix: 'card' (from the experts' cards), 'uniform', or a share per class
    memory: float = option(4096, number, low=1)  # how many images the long run is; older ones fade
    before: float = option(32, number, above=0)  # how many images of the home mix the long run starts with
    untilt: bool = option(True, yes_or_no)  # take class weights of losses off before comparing with the home mix
    even_heads: bool = option(True, yes_or_no)  # bring a head of three times the median size, or a third, to it
    refit: bool = option(True, yes_or_no)  # fit the last layer, if it is linear, to the experts' answers on all views
    refit_before: float = option(32, number, above=0)  # for how many images the merged layer itself counts in that
    match_scale: bool = option(True, yes_or_no)  # bring merged logits to the experts' long-run spread over images
    # Scale the encoders' changes up by what merging heads of different directions loses (needs a base).
    restore: bool = option(False, yes_or_no)

    def __post_init__(self) -> None:
        super().__post_init__()
        pool, self.needs = self.pool, ("base",) if self.restore else ()
        self._prepare_rows(pool)
        shared = {name: getattr(self, name) for name in SHARED_OPTIONS}
        self._rule = EntropyAdaptive(pool, temperature=self._temperature.tolist(), **shared)
        for name in SHARED_OPTIONS:
            setattr(self, name, getattr(self._rule, name))
        self.takes_padding, self.period = self._rule.takes_padding, self._rule.period
        self._scale = units.ScaleMatch(self._temperature, len(pool.classes))
        tilt = resolve_tilt(self.home, pool) if self.untilt else None
        self._home, self._untilted_home = resolve_home(self.home, pool), resolve_untilted_home(self.home, pool)
        home, untilted = (class_mix.as_mix(mix.to(pool.device)) for mix in (self._home, self._untilted_home))
        tilt = None if tilt is None else tilt.to(pool.device)
        self._prior = units.ClassPrior(home, untilted, tilt, self.anchor, self.before)
        self._fitted, self._seen = None, SeenClasses.of(pool)
        if self.refit and pool.last_layer is not None:
            self._fitted = units.FittedHead(pool.last_layer, self.refit_before, pool.device)
        elif self.refit:
            self._warn_that_no_head_is_fitted()
        self._fits: bool | None = None  # whether the last layer writes the logits, known after the first batch

    def _warn_that_no_head_is_fitted(self) -> None:
        network = self.pool.template.architecture
        message = f"'{self.name}' fits no head: {network} does not end in one linear layer with a bias."
        log_once(_log, logging.WARNING, message)

    def _prepare_rows(self, pool: ExpertPool) -> None:
        """Rows that are merged in place of the experts' own, and what their scores are divided by."""
        rows, self._temperature = pool.rows, resolve_temperature(self.temperature, pool)
        self._evened = torch.ones(len(pool), device=pool.device)  # what each expert's head was multiplied by
        if self.even_heads:
            rows, self._evened = even_heads(pool)
            self._temperature = self._temperature / self._evened
        self._rows, self._restored = restored(pool, rows) if self.restore else (rows, 1.0)
        self._of_base = torch.tensor([1 - self._restored], device=pool.device)  # not sent there at every step

    def start(self) -> PriorState:
        scale = self._scale.start() if self.match_scale else None
        fit = None if self._fitted is None or self._fits is False else self._fitted.start()
        return PriorState(self._rule.start(), self._prior.start(), scale, fit)

    def advance(self, batch: Batch, state: PriorState) -> tuple[Step, PriorState]:
        due = state.rule.batches % self.refresh_every == 0
        evidence, rule = self._rule.scored(batch, state.rule) if due else ({}, state.rule)
        state = replace(state, rule=replace(rule, batches=rule.batches + 1))
        if self.recalibrate_bn:  # the last batch's statistics have overwritten the merged ones
            self.held_from = None
        weights = self.merged(state)
        expert_logits = self.pool.logits_of_views(batch, (ORIGINAL, *self.views)) if due else None
        window = units.FadingWindow.of(batch, self.memory)
        logits, fit = self._answer(batch, state, weights, expert_logits, window)
        scale = state.scale
        if scale is not None:
            original = None if expert_logits is None else expert_logits[ORIGINAL]
            logits, scale = self._scale.matched(scale, logits, original, window)
        prior = self._prior.follow(state.prior, logits, window)
        coefficients = rule.encoder.clone(), rule.head.clone()
        step = Step(logits + prior.shift, *coefficients, **evidence, class_shift=prior.shift)
        return step, PriorState(state.rule, prior, scale, fit)

    def _answer(
        self,
        batch: Batch,
        state: PriorState,
        weights: Tensor,
        expert_logits: dict[str, Tensor] | None,
        window: units.FadingWindow,
    ) -> tuple[Tensor, units.FitState | None]:
        """The merged model's logits [B,C], with its last layer fitted where that is possible."""
        if self._fitted is None or state.fit is None or self._fits is False:
            return self.pool.forward(weights, batch.images, recalibrate_bn=self.recalibrate_bn), None
        try:
            logits, inputs = self.pool.forward_with_inputs(weights, batch.images, recalibrate_bn=self.recalibrate_bn)
        except NetworkError:
            if self._fits:
                raise
            self._fits = False
            self._warn_that_no_head_is_fitted()
            return self._answer(batch, state, weights, expert_logits, window)
        if self._fits is None:  # whether the last layer writes the logits: a fact of the network, seen once
            assert self.pool.last_layer is not None
            self._fits = head_fit.writes_logits(*self.pool.last_layer.of_weights(weights), inputs, logits)
            if not self._fits:
                self._warn_that_no_head_is_fitted()
                return logits, None
        fit = state.fit
        if expert_logits is not None:
            views = [self._seen.filled(expert_logits[view].float()) for view in (ORIGINAL, *self.views)]
            answer = units.common_answer(torch.stack(views), state.rule.encoder * self._evened)
            fit = self._fitted.learn(fit, inputs, answer, window)
        return self._fitted.answer(fit, weights, inputs)

    def merged_from(self, state: PriorState) -> tuple[Tensor, ...]:
        return state.rule.encoder, state.rule.head

    def merge_into(self, state: PriorState, out: Tensor) -> None:
        encoder = state.rule.encoder
        if self._restored != 1:
            encoder = torch.cat([self._restored * encoder, self._of_base])
        merging.merge(self._rows, encoder, state.rule.head, out)

    def weights(self, state: PriorState) -> Tensor:
        """The merged weights [P] that answered the last batch, its scale and shift in the last layer: a copy."""
        weights = self.merged(state).clone()
        scale, last = state.scale.scale if state.scale is not None else 1.0, self.pool.last_layer
        if last is not None:
            fitted, fit = self._fitted, state.fit
            weight, bias = last.of_weights(weights) if fitted is None or fit is None else fitted.layer(fit, weights)
            last.write(weights, scale * weight, scale * bias + state.prior.shift)
            return weights
        heads, classes = self.pool.template.head, len(self.pool.classes)
        entries = [entry for head in heads for entry in class_entries(self.pool.layout, head, classes)]
        for entry in entries:
            place = slice(entry.start, entry.stop)
            weights[place] = (scale * weights[place].float()).to(weights.dtype)
        for entry in [entry for entry in entries if len(entry.shape) == 1][-1:]:  # the last layer's bias
            weights[entry.start : entry.stop] += state.prior.shift.to(weights.dtype)
        return weights

    def card_values(self) -> dict[str, Any]:
        values = {"home": self._home, "temperature": resolve_temperature(self.temperature, self.pool)}
        if self._prior.tilt is not None:
            values |= {"tilt": self._prior.tilt, "untilted_home": self._untilted_home}
        return {**{name: value.tolist() for name, value in values.items()}, **self._seen.card_values()}
