"""Entropy-adaptive merging, Algorithm 1 of *The Mean is the Mirage*: one merged model for every batch."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.functional import scores as scoring
from mergestream.methods.base import ExpertLogits, Method
from mergestream.methods.choices import resolve_temperature
from mergestream.methods.seen import HeadRows
from mergestream.methods.step import Step
from mergestream.networks.views import ORIGINAL, require_views
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.option_checks import names, number, one_of, whole_number, yes_or_no

# entropy, scores, consistency, head expert and the experts' logits of a batch on which no expert was scored.
Evidence = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
NOTHING: Evidence = (None, None, None, None, None)


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
    portable: ClassVar[bool] = True
    _batches: int
    _encoder: Tensor  # the coefficients in use [K]
    _head: Tensor
    _stale: bool  # the merged weights are not those of the coefficients
    _place: object = None  # where they lie
    _reference: Tensor  # the merged model's entropy [] on the last batch that was scored; NaN before the first
    _moved: Tensor  # whether it is far from that now, on the device
    _drifted: bool  # the same, as far as the host has heard

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
        self.views = require_views(names("views", views))
        self.recalibrate_bn = yes_or_no("recalibrate_bn", recalibrate_bn)
        self.head_rows, self._rows_of = head_rows, HeadRows(pool, head_rows)
        self._weights = pool.new_weights()
        self.reset()

    def _step(self, images: Tensor, expert_logits: ExpertLogits) -> Step:
        due, merges = self._branch()
        evidence = self._refresh(images, expert_logits) if due else NOTHING
        if merges:
            self._merge()
        logits = self._answer(images)
        if self.refresh_drift:
            self._watch(scoring.entropy(logits[None], shares=self._shares)[0], scored=due)
        return Step(logits, self._encoder.clone(), self._head.clone(), *evidence)

    def _answer(self, images: Tensor) -> Tensor:
        """The merged model's logits [B,C]."""
        return self.pool.forward(self._weights, images, recalibrate_bn=self.recalibrate_bn)

    def _merge(self) -> None:
        self.pool.merge(self._encoder, self._head, out=self._weights, rows=self._rows_of(self._head))

    def merged_weights(self) -> Tensor:
        """The merged weights [P] in use, not a copy."""
        lent = getattr(self._place, "lent", None)
        return self._weights if lent is None else lent._weights

    def _branch(self) -> tuple[bool, bool]:
        """Whether the experts are scored on this batch, and whether a model is merged for it."""
        if self._decided is not None:
            return self._decided  # type: ignore[return-value]
        due = self._batches % self.refresh_every == 0 or self._drifted
        # Re-estimation overwrites the merged statistics, so every batch starts from the merged ones again.
        return due, due or self._stale or self.recalibrate_bn

    def _advance(self, *, eager: bool) -> None:
        self._batches += 1
        self._stale = False
        self._drifted = bool(self._moved) if eager and self.refresh_drift else False

    def _refresh(self, images: Tensor, expert_logits: ExpertLogits) -> Evidence:
        """Lines 1 to 6 of Algorithm 1: score the experts, then move the coefficients."""
        logits = self._all_logits(images, expert_logits)
        original = logits[ORIGINAL]
        scores = scoring.SCORES[self.score](original, self._temperature, self._shares)
        consistency = self._consistency(logits)
        chosen = simplex.head_expert(scores, consistency, self.epsilon)
        encoder = self._encoder_coefficients(scores)
        self._encoder = simplex.smooth(self._encoder, encoder, self.momentum)
        self._head = simplex.smooth(self._head, self._head_coefficients(scores, chosen, encoder), self.momentum)
        self._hear_experts(logits)
        entropy = scores if self.score == "entropy" else scoring.entropy(original, self._temperature, self._shares)
        return entropy, scores, consistency, chosen, self._asked(original)

    def _hear_experts(self, logits: Mapping[str, Tensor]) -> None:
        """What else a rule learns from the experts' logits [K,B,C] of a batch and its views; coefficients are set."""

    def _watch(self, entropy: Tensor, *, scored: bool) -> None:
        """Whether the merged model has become much more or less certain than when the experts were last scored."""
        self._moved = torch.zeros_like(entropy) if scored else (entropy - self._reference).abs() > self.refresh_drift
        self._reference = entropy if scored else torch.where(self._reference.isnan(), entropy, self._reference)

    def _all_logits(self, images: Tensor, known: ExpertLogits) -> dict[str, Tensor]:
        """Expert logits [K,B,C] of the batch and of its views: those computed before, and the others together."""
        wanted = (ORIGINAL, *self.views)
        if not known:
            return self.pool.logits_of_views(images, self.views)
        return {view: self._logits(images, known, None if view == ORIGINAL else view) for view in wanted}

    def _consistency(self, logits: Mapping[str, Tensor]) -> Tensor | None:
        if not self.views:
            return None
        changed = torch.stack([scoring.probabilities(logits[view], self._temperature) for view in self.views])
        return scoring.consistency(scoring.probabilities(logits[ORIGINAL], self._temperature), changed, self._shares)

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

    def _capturable(self) -> bool:
        return self.head_rows == "all"  # filling rows of unseen classes looks at them on the host

    def _takes_padding(self) -> bool:
        return not self.recalibrate_bn  # padding would count in the batch's statistics

    def _carried(self) -> dict[str, Tensor]:
        carried = {"encoder": self._encoder, "head": self._head}
        return {**carried, "reference": self._reference} if self.refresh_drift else carried

    def _carry(self, tensors: Mapping[str, Tensor]) -> None:
        self._encoder, self._head = tensors["encoder"], tensors["head"]
        self._reference = tensors.get("reference", self._reference)

    def _tells(self) -> dict[str, Tensor]:
        return {"moved": self._moved} if self.refresh_drift else {}

    def _hear(self, told: Mapping[str, float]) -> None:
        self._drifted = self._drifted or bool(told.get("moved", False))

    def _answers_from(self, place: object) -> None:
        self._stale = self._stale or place is not self._place
        self._place = place

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
        unknown = torch.full((), torch.nan, device=self.pool.device)
        self._reference = unknown if reference is None else reference.to(self.pool.device)
        self._moved = torch.zeros_like(unknown)
        self._drifted = bool(state.get("drifted", False))
        # The merged weights are a function of the coefficients: they are rebuilt, not saved.
        self._stale = True
