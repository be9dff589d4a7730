"""DaWin (Oh et al. 2025): coefficients for every image by entropy, one merged model for each group of alike images."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mergestream.functional.clustering import k_means
from mergestream.methods.asked_experts import AskedExperts
from mergestream.methods.base import option
from mergestream.methods.state import State, Step
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import whole_number, yes_or_no


@dataclass(kw_only=True, eq=False, repr=False)
class DaWin(AskedExperts[State]):
    """lambda_k(x) proportional to exp(-H_k(x)); k-means over a batch's lambdas; each group's mean lambda merges."""

    name: ClassVar[str] = "dawin"
    groups: int = option(3, whole_number, low=1)  # at most so many merged models per batch
    recalibrate_bn: bool = option(False, yes_or_no)  # BatchNorm statistics from each group, with one more forward

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        entropies = self._seen.image_entropies(self.ask(batch), self._temperature)  # [K,B]
        coefficients = torch.softmax(-entropies, dim=0).T  # [B,K]
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
