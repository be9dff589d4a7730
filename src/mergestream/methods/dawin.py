"""DaWin (Oh et al. 2025): coefficients for every image by entropy, one merged model for each group of alike images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream.functional import scores as scoring
from mergestream.functional.clustering import k_means
from mergestream.methods.base import Method, option
from mergestream.methods.card_values import resolve_temperature
from mergestream.methods.state import State, Step
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import number, whole_number, yes_or_no


@dataclass(kw_only=True, eq=False, repr=False)
class DaWin(Method[State]):
    """lambda_k(x) proportional to exp(-H_k(x)); k-means over a batch's lambdas; each group's mean lambda merges."""

    name: ClassVar[str] = "dawin"
    asks_experts = True
    groups: int = option(3, whole_number, low=1)  # at most so many merged models per batch
    sharpness: float = option(1.0, number, low=0)  # of the entropies in the exponent
    temperature: float | Sequence[float] | str = 1.0  # as in `entropy_adaptive`
    recalibrate_bn: bool = option(False, yes_or_no)  # BatchNorm statistics from each group, with one more forward

    def __post_init__(self) -> None:
        super().__post_init__()
        self._temperature = resolve_temperature(self.temperature, self.pool)

    def card_values(self) -> dict[str, Any]:
        return {"temperature": self._temperature.tolist()} if isinstance(self.temperature, str) else {}

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        logits = self.pool.logits_of_views(batch)[ORIGINAL]
        entropies = scoring.image_entropy(logits, self._temperature)  # [K,B]
        coefficients = torch.softmax(-self.sharpness * entropies, dim=0).T  # [B,K]
        answer = self._answer(batch.images, coefficients, k_means(coefficients, self.groups))
        mean = coefficients.mean(dim=0)
        return Step(answer, mean, mean.clone(), entropy=entropies.mean(dim=1)), state

    def _answer(self, images: Tensor, coefficients: Tensor, labels: Tensor) -> Tensor:
        """Logits [B,C]: each group of images is answered by the model merged with its mean coefficients."""
        answer = torch.empty(len(images), len(self.pool.classes), device=self.pool.device)
        for group in labels.unique().tolist():
            members = labels == group
            weights = self.pool.merge(coefficients[members].mean(dim=0), out=self._buffer)
            answer[members] = self.pool.forward(weights, images[members], recalibrate_bn=self.recalibrate_bn)
        return answer
