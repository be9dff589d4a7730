"""The experts' answers averaged: K models for every batch, no merged one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mergestream.methods.base import Method, option
from mergestream.methods.seen_classes import SeenClasses
from mergestream.methods.state import State, Step
from mergestream.networks.preprocessing import ORIGINAL, view_names
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import one_of


@dataclass(kw_only=True, eq=False, repr=False)
class Ensemble(Method[State]):
    """average: 'logits' (as FusionBench) or 'probabilities' (as deep ensembles; its logits are log mean p)."""

    average: str = option("logits", one_of, ("logits", "probabilities"))
    views: Sequence[str] = option((), view_names)  # averaged too, for as many forwards as adaptive methods take

    name: ClassVar[str] = "ensemble"
    static = True
    capturable = True
    asks_experts = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seen = SeenClasses.of(self.pool)

    def card_values(self) -> dict[str, Any]:
        return self._seen.card_values()

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        views = (ORIGINAL, *self.views)
        by_view = self.pool.logits_of_views(batch, views)
        votes = [self._seen.filled(by_view[view]) for view in views]
        logits = torch.cat(votes) if self.views else votes[0]
        if self.average == "logits":
            return Step(logits.mean(dim=0)), state
        return Step(torch.log_softmax(logits, dim=-1).logsumexp(dim=0) - math.log(len(logits))), state
