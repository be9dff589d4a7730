"""Entropy-adaptive merging, Algorithm 1 of *The Mean is the Mirage*: one merged model for every batch."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.functional import scores as scoring
from mergestream.functional.merging import weighted_sum
from mergestream.methods.entropy_options import EntropyOptions, EntropyState
from mergestream.methods.state import Step
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.runner import Batch


class EntropyAdaptive(EntropyOptions):
    """Confident experts weigh more in the encoder; the head follows the expert that is confident and consistent."""

    name: ClassVar[str] = "entropy_adaptive"

    def advance(self, batch: Batch, state: EntropyState) -> tuple[Step, EntropyState]:
        due = state.batches % self.refresh_every == 0 or (state.drift is not None and state.drift.drifted)
        evidence, state = self.scored(batch, state) if due else ({}, state)
        if self.recalibrate_bn:  # the last batch's statistics have overwritten the merged ones
            self.held_from = None
        weights = self.merged(state)
        if self._window is None or state.window is None:
            logits = self.pool.forward(weights, batch.images, recalibrate_bn=bool(self.recalibrate_bn))  # line 8, Eq. 6
        else:
            experts = self._seen.filled(batch.expert_logits[ORIGINAL]) if due and self.asks_experts else None
            logits, window = self._window.answer(batch, state.window, weights, experts)
            state = replace(state, window=window)
        if self.refresh_drift:
            state = self.watch_drift(state, scoring.entropy(logits[None], shares=batch.shares)[0], due)
        step = Step(logits, state.encoder.clone(), state.head.clone(), **evidence)
        return step, replace(state, batches=state.batches + 1)

    def scored(self, batch: Batch, state: EntropyState) -> tuple[dict[str, Any], EntropyState]:
        """Lines 1 to 6 of Algorithm 1: score the experts, then move the coefficients."""
        batch = batch.first(self.score_images) if self.score_images else batch
        logits, shares, tau = self.pool.logits_of_views(batch, (ORIGINAL, *self.views)), batch.shares, self._temperature
        if self._seen.mask is not None:
            logits = {view: self._seen.masked(own) for view, own in logits.items()}
        original = logits[ORIGINAL]
        scores = self._score(original, tau, shares)  # line 1, Eq. 3: E_k
        entropy = scores if self.score == "entropy" else self._entropy(original, tau, shares)
        consistency = None
        if self.views:  # line 3: C_k
            views = torch.stack(list(map(logits.__getitem__, self.views)))
            p = torch.softmax(original / tau[:, None, None], -1)
            consistency = scoring.consistency(p, torch.softmax(views / tau[:, None, None], -1), shares)
        chosen = simplex.head_expert(scores, consistency, self.epsilon)  # line 4, Eq. 8: k*
        if self.encoder == "uniform":
            encoder = simplex.uniform(len(scores), scores.device)
        elif self.weighting == "softmax":
            encoder = simplex.softmax(scores, self.encoder_sharpness)
        else:
            encoder = simplex.inverse(scores, self.epsilon)  # line 2, Eq. 4: a
        if self.head == "shared":
            head = encoder  # Eq. 5
        elif self.head == "select":
            head = simplex.select(scores, chosen)
        else:
            head = simplex.entropy_gap(scores, chosen, self.head_sharpness)  # line 5, Eq. 9: h
        if self.momentum:  # line 6
            encoder = simplex.smooth(state.encoder, encoder, self.momentum)
            head = simplex.smooth(state.head, head, self.momentum)
        evidence = {"entropy": entropy, "scores": scores, "consistency": consistency, "head_expert_index": chosen}
        return evidence, replace(state, encoder=encoder, head=head)

    def merged_from(self, state: EntropyState) -> tuple[Tensor, ...]:
        return state.encoder, state.head

    def merged(self, state: EntropyState) -> Tensor:
        """Line 7, Eq. 7: theta = sum_k a_k theta_k and W = sum_k h_k W_k, unless they are merged already."""
        held, out = self.held_from, self._buffer
        if held is None or held[0] is not state.encoder or held[1] is not state.head:
            rows = self._rows if self.head_rows == "all" else self._rows_of(state.head)
            border = rows.encoder.shape[1]
            weighted_sum(rows.encoder, state.encoder, out[:border])
            weighted_sum(rows.head, state.head, out[border:])
            self.held_from = state.encoder, state.head
        return out

    def weights(self, state: EntropyState) -> Tensor:
        if self._window is None or state.window is None:
            return self.merged(state)
        self.held_from = None  # the buffer may hold a window's statistics
        weights = self.merged(state)
        self._window.write(state.window, weights)
        return weights
