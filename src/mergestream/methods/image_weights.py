"""The experts' answers to each image, averaged with weights by entropy: K models, no merged one."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from mergestream.functional import class_mix
from mergestream.methods.asked_experts import AskedExperts
from mergestream.methods.base import option
from mergestream.methods.state import State, Step
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import number


@dataclass(kw_only=True, eq=False, repr=False)
class ImageWeights(AskedExperts[State]):
    """p(x) = sum_k w_k(x) p_k(x) with w_k(x) proportional to 1 / (H_k(x) + epsilon); logits are log p."""

    epsilon: float = option(1e-6, number, above=0)  # keeps 1/H finite where an expert is certain

    name: ClassVar[str] = "image_weights"
    static = True
    capturable = True

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        logits = self.ask(batch)
        entropies = self._seen.image_entropies(logits, self._temperature)  # [K,B]
        evidence = 1 / (entropies + self.epsilon)
        log_weights = torch.log_softmax(evidence.log(), dim=0)[..., None]
        answer = torch.logsumexp(log_weights + torch.log_softmax(self._seen.filled(logits), dim=-1), dim=0)
        shares = class_mix.counted(batch.shares, batch.images)
        return Step(answer, entropy=(entropies * shares).sum(dim=1)), state
