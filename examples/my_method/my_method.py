"""A method of your own: the experts' probabilities for each image, weighed by how sure each expert is."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from mergestream.methods import ORIGINAL, Batch, Method, State, Step


@dataclass(kw_only=True, eq=False, repr=False)
class ConfidentExperts(Method[State]):
    """The experts' probabilities for each image, weighed by the largest of each expert."""

    name: ClassVar[str] = "confident_experts"
    power: float = 2.0  # 0 weighs all experts alike

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        logits = self.pool.logits_of_views(batch)[ORIGINAL]  # [K,B,C]
        probabilities = torch.softmax(logits, dim=-1)
        weights = probabilities.amax(dim=-1, keepdim=True) ** self.power  # [K,B,1]
        mixed = (weights * probabilities).sum(dim=0) / weights.sum(dim=0)  # [B,C]
        return Step(mixed.clamp_min(1e-12).log()), state
