"""The mean of the experts' weights (Eq. 2): the same fixed coefficients for every batch."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mergestream import coefficients as simplex
from mergestream.errors import PoolError
from mergestream.methods.base import ExpertLogits, Method, Step
from mergestream.methods.choices import one_of, yes_or_no
from mergestream.pool import ExpertPool


class Mean(Method):
    """coefficients: 'uniform', 'samples' (by training-set size, as FedAvg), or numbers on the simplex.
    recalibrate_bn: re-estimate BatchNorm statistics from each batch, as in `entropy_adaptive`."""

    name: ClassVar[str] = "mean"

    def __init__(
        self, pool: ExpertPool, *, coefficients: str | Sequence[float] = "uniform", recalibrate_bn: bool = False
    ) -> None:
        super().__init__(pool)
        self.recalibrate_bn = yes_or_no("recalibrate_bn", recalibrate_bn)
        # Re-estimated BatchNorm statistics depend on the batch, and so does the model.
        self.static = not recalibrate_bn  # type: ignore[misc]
        self._coefficients = self._resolve(coefficients)
        self.coefficients = coefficients if isinstance(coefficients, str) else self._coefficients.tolist()
        self._weights = pool.merge(self._coefficients)

    def _step(self, images: Tensor, expert_logits: ExpertLogits) -> Step:  # noqa: ARG002
        if self.recalibrate_bn:
            self.pool.merge(self._coefficients, out=self._weights)
        logits = self.pool.forward(self._weights, images, recalibrate_bn=self.recalibrate_bn)
        return Step(logits, self._coefficients.clone(), self._coefficients.clone())

    def _resolve(self, coefficients: str | Sequence[float]) -> Tensor:
        if not isinstance(coefficients, str):
            return simplex.on_simplex(coefficients, len(self.pool), self.pool.device)
        if one_of("coefficients", coefficients, ("uniform", "samples")) == "uniform":
            return simplex.uniform(len(self.pool), self.pool.device)
        counts = torch.tensor([sum(card.class_counts.values()) for card in self.pool.cards], dtype=torch.float32)
        if not bool((counts > 0).all()):
            raise PoolError("coefficients='samples' needs class_counts in every expert's card; give numbers instead.")
        return (counts / counts.sum()).to(self.pool.device)
