"""Entropy-adaptive merging, Algorithm 1 of *The Mean is the Mirage*: one merged model for every batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.functional import merging
from mergestream.functional import scores as scoring
from mergestream.methods.base import Method
from mergestream.methods.batch import Batch
from mergestream.methods.choices import resolve_temperature
from mergestream.methods.head_rows import HeadRows
from mergestream.methods.state import COEFFICIENTS, State
from mergestream.methods.step import Step
from mergestream.networks.views import ORIGINAL, require_views
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.option_checks import names, number, one_of, whole_number, yes_or_no


@dataclass(frozen=True)
class EntropyState(State):
    batches: int
    encoder: Tensor = field(metadata=COEFFICIENTS)  # [K]
    head: Tensor = field(metadata=COEFFICIENTS)  # [K]
    # With refresh_drift: the merged model's entropy [] when the experts were last scored, and whether it has moved.
    reference: Tensor | None = None
    drifted: bool | None = None


class EntropyAdaptive(Method[EntropyState]):
    """Confident experts weigh more in the encoder; the head follows the expert that is confident and consistent.

    temperature      tau_e inside the softmax: a number, one per expert, or 'card' (each expert's own, from its card)
    epsilon          keeps 1/E finite where an expert is certain
    encoder          'adaptive' (Eq. 4) or 'uniform' (1/K, for the ablation)
    head             'entropy_gap' (Eq. 9), 'shared' (the encoder's, Eq. 5) or 'select' (Eq. 9 at tau_h -> infinity)
    head_sharpness   tau_h of Eq. 9
    momentum         the share kept of the old coefficients; 0 looks at this batch alone
    views            label-preserving views for the consistency C_k; () leaves it out
    score            'entropy' (Eq. 3) or 'max_softmax'
    weighting        'inverse' (Eq. 4) or 'softmax' with encoder_sharpness
    recalibrate_bn   re-estimate BatchNorm statistics of the merged model from the batch (one more forward)
    refresh_every    score the experts on every n-th batch only and reuse the merged model in between
    refresh_drift    and on the batch after the merged model's own entropy moved by more nats than this; 0 never
    head_rows        'all', or 'seen': a class's head row is merged from the experts that saw the class
    """

    name: ClassVar[str] = "entropy_adaptive"

    def __init__(
        self,
        pool: ExpertPool,
        *,
        temperature: float | Sequence[float] | str = 1.0,
        epsilon: float = 1e-6,
        encoder: str = "adaptive",
        head: str = "entropy_gap",
        head_sharpness: float = 1.0,
        momentum: float = 0.0,
        views: Sequence[str] = ("hflip",),
        score: str = "entropy",
        weighting: str = "inverse",
        encoder_sharpness: float = 1.0,
        recalibrate_bn: bool = False,
        refresh_every: int = 1,
        refresh_drift: float = 0.0,
        head_rows: str = "all",
    ) -> None:
        super().__init__(pool)
        self.temperature, self._temperature = temperature, resolve_temperature(temperature, pool)
        self.epsilon = number("epsilon", epsilon, above=0)
        self.encoder = one_of("encoder", encoder, ("adaptive", "uniform"))
        self.head = one_of("head", head, ("entropy_gap", "shared", "select"))
        self.head_sharpness = number("head_sharpness", head_sharpness, low=0)
        self.momentum = number("momentum", momentum, low=0, below=1)
        self.views = require_views(names("views", views))
        self.score = one_of("score", score, tuple(scoring.SCORES))
        self.weighting = one_of("weighting", weighting, ("inverse", "softmax"))
        self.encoder_sharpness = number("encoder_sharpness", encoder_sharpness, low=0)
        self.recalibrate_bn = yes_or_no("recalibrate_bn", recalibrate_bn)
        self.refresh_every = self.period = whole_number("refresh_every", refresh_every, low=1)
        self.refresh_drift = number("refresh_drift", refresh_drift, low=0)
        self.head_rows, self._rows_of = head_rows, HeadRows(pool, head_rows)
        # Filling rows of unseen classes and comparing a drift both read the device.
        self.capturable = head_rows == "all" and not refresh_drift
        self.takes_padding = not recalibrate_bn  # padding would count in the batch's statistics

    def start(self) -> EntropyState:
        share = simplex.uniform(len(self.pool), self.pool.device)
        if not self.refresh_drift:
            return EntropyState(0, share, share)
        return EntropyState(0, share, share, torch.full((), torch.nan, device=self.pool.device), drifted=False)

    def card_values(self) -> dict[str, Any]:
        return {"temperature": self._temperature.tolist()} if isinstance(self.temperature, str) else {}

    def advance(self, batch: Batch, state: EntropyState) -> tuple[Step, EntropyState]:
        due = self.is_due(state)
        evidence, state = self.scored(batch, state) if due else ({}, state)
        if self.recalibrate_bn:  # the last batch's statistics have overwritten the merged ones
            self.held_from = None
        weights = self.merged(state)
        logits = self.pool.forward(weights, batch.images, recalibrate_bn=self.recalibrate_bn)  # line 8
        if self.refresh_drift:
            state = self._watched(state, scoring.entropy(logits[None], shares=batch.shares)[0], due)
        step = Step(logits, state.encoder.clone(), state.head.clone(), **evidence)
        return step, replace(state, batches=state.batches + 1)

    def is_due(self, state: EntropyState) -> bool:
        """Whether the experts are scored on the next batch."""
        return state.batches % self.refresh_every == 0 or bool(state.drifted)

    def scored(self, batch: Batch, state: EntropyState) -> tuple[dict[str, Any], EntropyState]:
        """Lines 1 to 6 of Algorithm 1: score the experts, then move the coefficients."""
        logits, shares, tau = batch.logits(self.views), batch.shares, self._temperature
        original = logits[ORIGINAL]
        scores = scoring.SCORES[self.score](original, tau, shares)  # E_k
        entropy = scores if self.score == "entropy" else scoring.entropy(original, tau, shares)
        encoder = self._encoder_coefficients(scores)  # a
        consistency = None
        if self.views:  # C_k
            changed = torch.stack([scoring.probabilities(logits[view], tau) for view in self.views])
            consistency = scoring.consistency(scoring.probabilities(original, tau), changed, shares)
        chosen = simplex.head_expert(scores, consistency, self.epsilon)  # k*
        head = self._head_coefficients(scores, chosen, encoder)  # h
        evidence = {"entropy": entropy, "scores": scores, "consistency": consistency, "head_expert_index": chosen}
        encoder = simplex.smooth(state.encoder, encoder, self.momentum)
        head = simplex.smooth(state.head, head, self.momentum)
        return evidence, replace(state, encoder=encoder, head=head)

    def _encoder_coefficients(self, scores: Tensor) -> Tensor:
        if self.encoder == "uniform":
            return simplex.uniform(len(scores), scores.device)
        if self.weighting == "softmax":
            return simplex.softmax(scores, self.encoder_sharpness)
        return simplex.inverse(scores, self.epsilon)  # Eq. 4

    def _head_coefficients(self, scores: Tensor, chosen: Tensor, encoder: Tensor) -> Tensor:
        if self.head == "shared":
            return encoder
        if self.head == "select":
            return simplex.select(scores, chosen)
        return simplex.entropy_gap(scores, chosen, self.head_sharpness)  # Eq. 9

    def merged_from(self, state: EntropyState) -> tuple[Tensor, ...]:
        return state.encoder, state.head

    def merge_into(self, state: EntropyState, out: Tensor) -> None:
        merging.merge(self._rows_of(state.head), state.encoder, state.head, out)  # Eq. 7

    def weights(self, state: EntropyState) -> Tensor:
        return self.merged(state)

    def _watched(self, state: EntropyState, entropy: Tensor, due: bool) -> EntropyState:
        """Note whether the merged model has become much more or less certain since the experts were last scored."""
        if due:
            return replace(state, reference=entropy, drifted=False)
        assert state.reference is not None
        moved = bool((entropy - state.reference).abs() > self.refresh_drift)
        reference = torch.where(state.reference.isnan(), entropy, state.reference)
        return replace(state, reference=reference, drifted=moved)
