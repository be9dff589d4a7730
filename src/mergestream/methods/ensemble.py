"""The experts' answers averaged: K models for every batch, no merged one."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from mergestream.methods.base import Method, option
from mergestream.methods.state import State, Step
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import one_of


@dataclass(kw_only=True, eq=False, repr=False)
class Ensemble(Method[State]):
    """average: 'logits' (as FusionBench) or 'probabilities' (as deep ensembles; its logits are log mean p)."""

    average: str = option("logits", one_of, ("logits", "probabilities"))

    name: ClassVar[str] = "ensemble"
    static = True
    capturable = True

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        logits = self.pool.logits_of_views(batch)[ORIGINAL]
        if self.average == "logits":
            return Step(logits.mean(dim=0)), state
        return Step(torch.log_softmax(logits, dim=-1).logsumexp(dim=0) - math.log(len(logits))), state
