"""Entropy-adaptive merging, Algorithm 1 of *The Mean is the Mirage*: one merged model for every batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.functional import scores as scoring
from mergestream.functional.merging import weighted_sum
from mergestream.methods.base import Method
from mergestream.methods.card_values import resolve_temperature
from mergestream.methods.expert_rows import HeadRows
from mergestream.methods.state import COEFFICIENTS, State
from mergestream.methods.step import Step
from mergestream.networks.preprocessing import ORIGINAL, require_views
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import Batch
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
        self.head_rows, self._rows, self._rows_of = head_rows, pool.rows, HeadRows(pool, head_rows)
        self._weigh: Callable[[Tensor], Tensor] = partial(simplex.inverse, epsilon=self.epsilon)
        if encoder == "uniform":
            self._weigh = lambda scores: simplex.uniform(len(scores), scores.device)
        elif weighting == "softmax":
            self._weigh = partial(simplex.softmax, sharpness=self.encoder_sharpness)
        self._gap = simplex.select if head == "select" else partial(simplex.entropy_gap, sharpness=self.head_sharpness)
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
        due = state.batches % self.refresh_every == 0 or bool(state.drifted)
        evidence, state = self.scored(batch, state) if due else ({}, state)
        if self.recalibrate_bn:  # the last batch's statistics have overwritten the merged ones
            self.held_from = None
        weights = self.merged(state)
        logits = self.pool.forward(weights, batch.images, recalibrate_bn=self.recalibrate_bn)  # line 8
        if self.refresh_drift:
            state = self._watched(state, scoring.entropy(logits[None], shares=batch.shares)[0], due)
        step = Step(logits, state.encoder.clone(), state.head.clone(), **evidence)
        return step, replace(state, batches=state.batches + 1)

    def scored(self, batch: Batch, state: EntropyState) -> tuple[dict[str, Any], EntropyState]:
        """Lines 1 to 6 of Algorithm 1: score the experts, then move the coefficients."""
        logits, shares, tau = self.pool.logits_of_views(batch, (ORIGINAL, *self.views)), batch.shares, self._temperature
        original = logits[ORIGINAL]
        scores = scoring.SCORES[self.score](original, tau, shares)  # E_k
        entropy = scores if self.score == "entropy" else scoring.entropy(original, tau, shares)
        consistency = None
        if self.views:  # C_k
            views = torch.stack(list(map(logits.__getitem__, self.views)))
            p, changed = (
                torch.softmax(original / tau[:, None, None], -1),
                torch.softmax(views / tau[:, None, None], -1),
            )
            consistency = scoring.consistency(p, changed, shares)
        chosen = simplex.head_expert(scores, consistency, self.epsilon)  # k*, Eq. 8
        encoder = self._weigh(scores)  # a, Eq. 4
        head = encoder if self.head == "shared" else self._gap(scores, chosen)  # h, Eq. 5 or 9
        if self.momentum:
            encoder = simplex.smooth(state.encoder, encoder, self.momentum)
            head = simplex.smooth(state.head, head, self.momentum)
        evidence = {"entropy": entropy, "scores": scores, "consistency": consistency, "head_expert_index": chosen}
        return evidence, replace(state, encoder=encoder, head=head)

    def merged_from(self, state: EntropyState) -> tuple[Tensor, ...]:
        return state.encoder, state.head

    def merged(self, state: EntropyState) -> Tensor:
        """theta = sum_k a_k theta_k and W = sum_k h_k W_k (Eq. 7), unless they are merged already."""
        held, out = self.held_from, self._buffer
        if held is None or held[0] is not state.encoder or held[1] is not state.head:
            rows = self._rows if self.head_rows == "all" else self._rows_of(state.head)
            border = rows.encoder.shape[1]
            weighted_sum(rows.encoder, state.encoder, out[:border])
            weighted_sum(rows.head, state.head, out[border:])
            self.held_from = state.encoder, state.head
        return out

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
