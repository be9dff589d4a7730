"""Bring a merged model's logits to the experts' spread over images, both over the long run: docs/prior_adaptive.md."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mergestream.functional import class_mix
from mergestream.methods.fading import FadingWindow
from mergestream.methods.state import PER_EXPERT, State


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
