"""How a batch counts in sums over a stream that fade."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

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
        if batch.shares is None:
            return _of_whole_batch(len(batch.images), memory, batch.images.device)
        images = 1 / (batch.shares**2).sum()
        return cls(batch.shares, images, torch.exp(-images / memory))

    def add(self, sums: Tensor, means: Tensor) -> Tensor:
        """Older sums, faded, and the batch's, of which means over its images are given."""
        return self.faded * sums + self.images * means


@cache  # and never less: graphs read these tensors
def _of_whole_batch(images: int, memory: float, device: torch.device) -> FadingWindow:
    """Every image counts alike."""
    with torch.inference_mode(False):
        return FadingWindow.of(Batch(torch.empty(0), shares=torch.full((images,), 1 / images, device=device)), memory)
