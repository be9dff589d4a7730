"""The experts' answers to each image, averaged with weights by entropy: K models, no merged one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mergestream.functional import scores as scoring
from mergestream.methods.base import Method, option
from mergestream.methods.card_values import resolve_temperature
from mergestream.methods.state import State, Step
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import number


@dataclass(kw_only=True, eq=False, repr=False)
class ImageWeights(Method[State]):
    """p(x) = sum_k w_k(x) p_k(x) with w_k(x) proportional to 1 / (H_k(x) + epsilon); logits are log p."""

    temperature: float | Sequence[float] | str = 1.0  # in the entropies, as in `entropy_adaptive`
    epsilon: float = option(1e-6, number, above=0)  # keeps 1/H finite where an expert is certain

    name: ClassVar[str] = "image_weights"
    asks_experts = True
    static = True
    capturable = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._temperature = resolve_temperature(self.temperature, self.pool)

    def card_values(self) -> dict[str, Any]:
        return {"temperature": self._temperature.tolist()} if isinstance(self.temperature, str) else {}

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        logits = self.pool.logits_of_views(batch)[ORIGINAL]
        evidence = 1 / (scoring.image_entropy(logits, self._temperature) + self.epsilon)  # [K,B]
        log_weights = torch.log_softmax(evidence.log(), dim=0)[..., None]
        answer = torch.logsumexp(log_weights + torch.log_softmax(logits, dim=-1), dim=0)
        return Step(answer, entropy=scoring.entropy(logits, self._temperature, batch.shares)), state
