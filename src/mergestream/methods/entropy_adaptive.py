"""Entropy-adaptive merging, Algorithm 1 of *The Mean is the Mirage*: one merged model for every batch."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream import coefficients as simplex
from mergestream import scoring
from mergestream.methods.base import ExpertLogits, Method, Step
from mergestream.methods.choices import resolve_temperature
from mergestream.methods.seen import HeadRows
from mergestream.options import names, number, one_of, whole_number, yes_or_no
from mergestream.pool import ExpertPool
from mergestream.views import require_known

# entropy, scores, consistency and head expert of a batch on which no expert was scored.
Evidence = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
NOTHING: Evidence = (None, None, None, None)


class EntropyAdaptive(Method):
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
    _batches: int
    _encoder: Tensor  # the coefficients in use [K]
    _head: Tensor
    _stale: bool  # the merged weights are not those of the coefficients
    _reference: Tensor | None  # the merged model's entropy [] on the last batch that was scored
    _drifted: bool

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
        self.momentum = number("momentum", momentum, low=0, below=1)  # the share kept of the old value
        self.refresh_every = whole_number("refresh_every", refresh_every, low=1)
        self.refresh_drift = number("refresh_drift", refresh_drift, low=0)
        self.encoder = one_of("encoder", encoder, ("adaptive", "uniform"))
        self.head = one_of("head", head, ("entropy_gap", "shared", "select"))
        self.score = one_of("score", score, tuple(scoring.SCORES))
        self.weighting = one_of("weighting", weighting, ("inverse", "softmax"))
        self.head_sharpness = number("head_sharpness", head_sharpness, low=0)
        self.encoder_sharpness = number("encoder_sharpness", encoder_sharpness, low=0)
        self.views = require_known(names("views", views))
        self.recalibrate_bn = yes_or_no("recalibrate_bn", recalibrate_bn)
        self.head_rows, self._rows_of = head_rows, HeadRows(pool, head_rows)
        self._weights = pool.new_weights()
        self.reset()

    def _step(self, images: Tensor, expert_logits: ExpertLogits) -> Step:
        due = self._batches % self.refresh_every == 0 or self._drifted
        evidence = self._refresh(images, expert_logits) if due else NOTHING
        # Re-estimation overwrites the merged statistics, so every batch starts from the merged ones again.
        if evidence is not NOTHING or self._stale or self.recalibrate_bn:
            self.pool.merge(self._encoder, self._head, out=self._weights, rows=self._rows_of(self._head))
            self._stale = False
        self._batches += 1
        logits = self.pool.forward(self._weights, images, recalibrate_bn=self.recalibrate_bn)
        if self.refresh_drift:
            self._watch(scoring.entropy(logits[None])[0], scored=due)
        return Step(logits, self._encoder.clone(), self._head.clone(), *evidence)

    def _refresh(self, images: Tensor, expert_logits: ExpertLogits) -> Evidence:
        """Lines 1 to 6 of Algorithm 1: score the experts, then move the coefficients."""
        logits = self._logits(images, expert_logits)
        scores = scoring.SCORES[self.score](logits, self._temperature)
        consistency = self._consistency(images, logits, expert_logits)
        chosen = simplex.head_expert(scores, consistency, self.epsilon)
        encoder = self._encoder_coefficients(scores)
        self._encoder = simplex.smooth(self._encoder, encoder, self.momentum)
        self._head = simplex.smooth(self._head, self._head_coefficients(scores, chosen, encoder), self.momentum)
        entropy = scores if self.score == "entropy" else scoring.entropy(logits, self._temperature)
        return entropy, scores, consistency, chosen

    def _watch(self, entropy: Tensor, *, scored: bool) -> None:
        """Whether the merged model has become much more or less certain than when the experts were last scored."""
        if scored or self._reference is None:
            self._reference, self._drifted = entropy, False
        else:
            self._drifted = bool((entropy - self._reference).abs() > self.refresh_drift)

    def _consistency(self, images: Tensor, logits: Tensor, expert_logits: ExpertLogits) -> Tensor | None:
        if not self.views:
            return None
        views = torch.stack([self._logits(images, expert_logits, view) for view in self.views])
        changed = torch.stack([scoring.probabilities(view, self._temperature) for view in views])
        return scoring.consistency(scoring.probabilities(logits, self._temperature), changed)

    def _encoder_coefficients(self, scores: Tensor) -> Tensor:
        if self.encoder == "uniform":
            return simplex.uniform(len(scores), scores.device)
        if self.weighting == "softmax":
            return simplex.softmax(scores, self.encoder_sharpness)
        return simplex.inverse(scores, self.epsilon)

    def _head_coefficients(self, scores: Tensor, chosen: Tensor, encoder: Tensor) -> Tensor:
        if self.head == "shared":
            return encoder
        if self.head == "select":
            return simplex.select(scores, chosen)
        return simplex.entropy_gap(scores, chosen, self.head_sharpness)

    def _state(self) -> dict[str, Any]:
        state = {"batches": self._batches, "encoder": self._encoder.clone(), "head": self._head.clone()}
        watched = {"reference": self._reference, "drifted": self._drifted}
        return {**state, **watched} if self.refresh_drift else state

    def _restore(self, state: Mapping[str, Any]) -> None:
        start = simplex.uniform(len(self.pool), self.pool.device)
        self._batches = state.get("batches", 0)
        self._encoder = state.get("encoder", start).to(self.pool.device)
        self._head = state.get("head", start).to(self.pool.device)
        reference = state.get("reference")
        self._reference = None if reference is None else reference.to(self.pool.device)
        self._drifted = bool(state.get("drifted", False))
        # The merged weights are a function of the coefficients: they are rebuilt, not saved.
        self._stale = True
