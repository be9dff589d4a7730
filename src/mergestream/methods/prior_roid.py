"""The prior correction of ROID (Marsden et al. 2024): answers weighted by their smoothed mean over the batch."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from mergestream.functional import class_mix
from mergestream.methods.state import Step
from mergestream.methods.wrapper import Wrapper, WrapperState
from mergestream.pool.runner import Batch


@dataclass(kw_only=True, eq=False, repr=False)
class PriorRoid(Wrapper[WrapperState]):
    """p · (m + s)/(1 + s C) renormalised: m [C] the mean of p over the batch, s = max(1/B, 1/C) / max(m)."""

    name: ClassVar[str] = "prior_roid"
    corrects_mix = True

    def advance(self, batch: Batch, state: WrapperState) -> tuple[Step, WrapperState]:
        step, base = self._base.advance(batch, state.base)
        logs, shares = torch.log_softmax(step.logits.float(), dim=-1), class_mix.counted(batch.shares, batch.images)
        mean = (logs.exp() * shares[:, None]).sum(dim=0)
        one_image, classes = shares.square().sum(), len(mean)  # 1/B, C
        smoothing = one_image.clamp_min(1 / classes) / mean.max()
        prior = (mean + smoothing) / (1 + smoothing * classes)
        return replace(step, logits=torch.log_softmax(logs + prior.log(), dim=-1)), WrapperState(base)
