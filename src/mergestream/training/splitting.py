"""Training and validation: a seeded shuffle that never cuts a group in two."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mergestream.runtime.errors import TrainingError


def split(count: int, share: float, seed: int, groups: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
    """Training and validation indices of a seeded shuffle; a group (slide, patient, lesion) is never cut in two."""
    generator = torch.Generator().manual_seed(seed)
    held_out = max(1, int(share * count))
    if groups is None:
        order = torch.randperm(count, generator=generator)
        return order[held_out:], order[:held_out]
    names, place = np.unique(np.asarray(groups), return_inverse=True)
    if len(names) < 2:
        raise TrainingError(f"All {count} images are of one group ('{names[0]}'): there is nothing to validate on.")
    rank = torch.randperm(len(names), generator=generator)[torch.from_numpy(place)]  # of every image's group
    order = torch.argsort(rank, stable=True)
    # Whole groups until the share is reached; the last group always stays for training.
    boundary = min(int(rank[order[held_out - 1]]), len(names) - 2)
    return order[rank[order] > boundary], order[rank[order] <= boundary]
