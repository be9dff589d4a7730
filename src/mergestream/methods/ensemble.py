"""The experts' answers averaged: K models for every batch, no merged one."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from mergestream.methods.base import ExpertLogits, Method
from mergestream.methods.step import Step
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.option_checks import one_of


class Ensemble(Method):
    """average: 'logits' (as FusionBench) or 'probabilities' (as deep ensembles; its logits are log mean p)."""

    name: ClassVar[str] = "ensemble"
    static: ClassVar[bool] = True
    portable: ClassVar[bool] = True

    def __init__(self, pool: ExpertPool, *, average: str = "logits") -> None:
        super().__init__(pool)
        self.average = one_of("average", average, ("logits", "probabilities"))

    def _step(self, images: Tensor, expert_logits: ExpertLogits) -> Step:
        logits = self._logits(images, expert_logits)
        if self.average == "logits":
            return Step(logits.mean(dim=0), expert_logits=self._asked(logits))
        mean = torch.log_softmax(logits, dim=-1).logsumexp(dim=0) - math.log(len(logits))
        return Step(mean, expert_logits=self._asked(logits))

    def _capturable(self) -> bool:
        return True

    def _takes_padding(self) -> bool:
        return True  # every image is answered for itself
