"""The mean of the experts' weights (Eq. 2): the same fixed coefficients for every batch."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mergestream import coefficients as simplex
from mergestream.batchnorm import reestimate
from mergestream.errors import PoolError
from mergestream.methods.base import ExpertLogits, Method, Step
from mergestream.methods.choices import one_of
from mergestream.pool import ExpertPool


class Mean(Method):
    """coefficients: 'uniform', 'samples' (by training-set size, as FedAvg), or numbers on the simplex."""

    name: ClassVar[str] = "mean"

    def __init__(
        self, pool: ExpertPool, *, coefficients: str | Sequence[float] = "uniform", recalibrate_bn: bool = False
    ) -> None:
        super().__init__(pool)
        self.coefficients, self.recalibrate_bn = coefficients, recalibrate_bn
        # Re-estimated BatchNorm statistics depend on the batch, and so does the model.
        self.static = not recalibrate_bn  # type: ignore[misc]
        self._coefficients = self._resolve(coefficients)
        self._weights = pool.merge(self._coefficients)

    def _step(self, images: Tensor, expert_logits: ExpertLogits) -> Step:  # noqa: ARG002
        if self.recalibrate_bn:
            self.pool.merge(self._coefficients, out=self._weights)
            reestimate(self.pool.module_with(self._weights), images)
        logits = self.pool.forward(self._weights, images)
        return Step(logits, encoder_coefficients=self._coefficients, head_coefficients=self._coefficients)

    def _resolve(self, coefficients: str | Sequence[float]) -> Tensor:
        if not isinstance(coefficients, str):
            return simplex.on_simplex(coefficients, len(self.pool), self.pool.device)
        if one_of("coefficients", coefficients, ("uniform", "samples")) == "uniform":
            return simplex.uniform(len(self.pool), self.pool.device)
        counts = torch.tensor([sum(card.class_counts.values()) for card in self.pool.cards], dtype=torch.float32)
        if not bool((counts > 0).all()):
            raise PoolError("coefficients='samples' needs class_counts in every expert's card; give numbers instead.")
        return (counts / counts.sum()).to(self.pool.device)
