"""The experts' answers averaged: K models for every batch, no merged one."""

import math
from typing import ClassVar

import torch

from mergestream.methods.base import Method
from mergestream.methods.state import State
from mergestream.methods.step import Step
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import one_of


class Ensemble(Method[State]):
    """average: 'logits' (as FusionBench) or 'probabilities' (as deep ensembles; its logits are log mean p)."""

    name: ClassVar[str] = "ensemble"
    static = True
    capturable = True

    def __init__(self, pool: ExpertPool, *, average: str = "logits") -> None:
        super().__init__(pool)
        self.average = one_of("average", average, ("logits", "probabilities"))

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        logits = self.pool.logits_of_views(batch)[ORIGINAL]
        if self.average == "logits":
            return Step(logits.mean(dim=0)), state
        return Step(torch.log_softmax(logits, dim=-1).logsumexp(dim=0) - math.log(len(logits))), state
