"""Training and validation split."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mergestream.runtime.errors import TrainingError


def split(count: int, share: float, seed: int, groups: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
    """Shuffle with a seed and return training and validation indices; a group (slide, patient, lesion) stays whole."""
    generator = torch.Generator().manual_seed(seed)
    held_out = max(1, int(share * count))
    if groups is None:
        order = torch.randperm(count, generator=generator)
        return order[held_out:], order[:held_out]
    names, group = np.unique(np.asarray(groups), return_inverse=True)
    if len(names) < 2:
        raise TrainingError(f"All {count} images are of one group ('{names[0]}'): there is nothing to validate on.")
    rank = torch.randperm(len(names), generator=generator)[torch.from_numpy(group)]  # per image
    order = torch.argsort(rank, stable=True)
    # Whole groups until the share is reached; at least one group remains for training.
    boundary = min(int(rank[order[held_out - 1]]), len(names) - 2)
    return order[rank[order] > boundary], order[rank[order] <= boundary]
