"""How a batch counts in sums over a stream that fade."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergestream.functional import class_mix
from mergestream.pool.runner import Batch

MORE_THAN_ONE = 1.5  # images


@dataclass(frozen=True)
class FadingWindow:
    """How a batch counts in such sums."""

    shares: Tensor  # what each image counts in a mean over the batch [B]
    images: Tensor  # how many images that are []
    faded: Tensor  # what is left of older sums []

    @classmethod
    def of(cls, batch: Batch, memory: float) -> FadingWindow:
        """`memory`: over how many images a sum fades to 1/e."""
        shares = class_mix.counted(batch.shares, batch.images)
        images = 1 / (shares**2).sum()
        return cls(shares, images, torch.exp(-images / memory))

    def add(self, sums: Tensor, means: Tensor) -> Tensor:
        """Older sums, faded, and the batch's, of which means over its images are given."""
        return self.faded * sums + self.images * means
