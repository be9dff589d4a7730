"""How much a class counts: in the training loss, and in the loss that chooses a step."""

import torch
from torch import Tensor

from mergestream.data.datasets.domain_data import DomainData


def class_weights(data: DomainData, training: Tensor) -> Tensor:
    """Weights [C] of the loss, inverse to the training split's class counts; 0 for a class without images."""
    counts = torch.bincount(data.labels[training], minlength=len(data.classes)).float()
    present = counts > 0
    return torch.where(present, counts.sum() / (present.sum() * counts.clamp_min(1)), 0)


def balanced_loss(losses: Tensor, labels: Tensor) -> float:
    """Mean over the classes of each class's mean loss [N]; classes without images are left out."""
    return float(torch.stack([losses[labels == label].mean() for label in labels.unique()]).mean())
