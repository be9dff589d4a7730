"""The experts' answers averaged: K models for every batch, no merged one."""

from typing import ClassVar

import torch
from torch import Tensor

from mergestream.methods.base import ExpertLogits, Method, Step
from mergestream.options import one_of
from mergestream.pool import ExpertPool


class Ensemble(Method):
    """average: 'logits' (as FusionBench) or 'probabilities' (as deep ensembles; its logits are log mean p)."""

    name: ClassVar[str] = "ensemble"
    static: ClassVar[bool] = True

    def __init__(self, pool: ExpertPool, *, average: str = "logits") -> None:
        super().__init__(pool)
        self.average = one_of("average", average, ("logits", "probabilities"))

    def _step(self, images: Tensor, expert_logits: ExpertLogits) -> Step:
        logits = self._logits(images, expert_logits)
        if self.average == "logits":
            return Step(logits.mean(dim=0))
        log_count = torch.tensor(float(len(logits)), device=logits.device).log()
        return Step(torch.log_softmax(logits, dim=-1).logsumexp(dim=0) - log_count)
