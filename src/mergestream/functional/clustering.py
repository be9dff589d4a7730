"""k-means without chance. Pure functions; shapes: B points, K coordinates, G groups."""

import torch
from torch import Tensor

ROUNDS = 100


def k_means(points: Tensor, groups: int) -> Tensor:
    """The group of each point [B] by Lloyd's algorithm. points [B,K]; a group may stay empty.

    The first start is the point farthest from the mean of all, each further one the point farthest from its nearest
    start; of equals the first in the batch.
    """
    centres = _starts(points, groups)
    labels = nearest(points, centres)
    for _ in range(ROUNDS):
        members = (labels[:, None] == torch.arange(groups, device=points.device)).to(points.dtype)  # [B,G]
        sizes = members.sum(dim=0)[:, None]
        centres = torch.where(sizes > 0, members.T @ points / sizes.clamp_min(1), centres)
        moved = nearest(points, centres)
        if torch.equal(moved, labels):
            break
        labels = moved
    return labels


def with_centres(points: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The mean point [G,K] of each group that k-means finds, and the group [B] of each point; no group is empty."""
    labels = k_means(points, groups).unique(return_inverse=True)[1]
    return torch.stack([points[labels == group].mean(dim=0) for group in range(int(labels.max()) + 1)]), labels


def _starts(points: Tensor, groups: int) -> Tensor:
    distance = (points - points.mean(dim=0)).square().sum(dim=1)
    starts: list[Tensor] = []
    for _ in range(groups):
        starts.append(points[distance.argmax()])
        to_last = (points - starts[-1]).square().sum(dim=1)
        distance = to_last if len(starts) == 1 else torch.minimum(distance, to_last)
    return torch.stack(starts)


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """The centre [B] that is closest to each point; of equals the first."""
    return (points[:, None] - centres).square().sum(dim=-1).argmin(dim=1)
