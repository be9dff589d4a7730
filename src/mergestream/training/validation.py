"""Validation of a fit: the split, the criterion and the temperature."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

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


def balanced_loss(losses: Tensor, labels: Tensor) -> float:
    """Mean over the classes of each class's mean loss [N]; classes without images are left out."""
    return float(torch.stack([losses[labels == label].mean() for label in labels.unique()]).mean())


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature tau that minimises the cross-entropy of z / tau on logits [N,C] (Guo et al. 2017)."""
    log_tau = torch.zeros((), requires_grad=True)
    optimiser = torch.optim.LBFGS([log_tau], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(logits / log_tau.exp(), labels)
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    # A split without a single error would push tau to 0; no expert is trusted that far.
    return float(log_tau.detach().exp().clamp(0.05, 20))
