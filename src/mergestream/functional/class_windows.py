"""Statistics of a stream from sums by class, so that a run of one class does not move them to that class.

Pure functions of fp32 tensors. Shapes: B images, C classes, T channels.
"""

import torch
from torch import Tensor

TINY = 1e-12


def weights_of_classes(answers: Tensor, shares: Tensor) -> Tensor:
    """How much each image counts for each class [B,C]: answers [B,C], of which padding (a share of 0) has none."""
    images = 1 / (shares**2).sum()
    return answers * (shares * images)[:, None]


def add(sums: Tensor, faded: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Sums by class [C,T] after a batch: older ones faded [C], values [B,T] added by weights [B,C]."""
    return faded[:, None] * sums + weights.T @ values


def mean_over_classes(
    sums: Tensor, images: Tensor, mix: Tensor, start: float, *, class_images: float, start_classes: float
) -> Tensor:
    """The mean [T] of values if classes are mixed as mix [C], of any sum: from sums by class [C,T] over images [C].

    A class's mean is drawn to a mean over classes, which stands for `class_images` of its images; that one is drawn to
    `start`, which stands for `start_classes` classes. A class without images is thought to be like the others.
    """
    certain = images / (images + class_images).clamp_min(TINY)
    own = sums / images.clamp_min(TINY)[:, None]
    common = (certain @ own + start_classes * start) / (certain.sum() + start_classes).clamp_min(TINY)
    means = torch.lerp(common.expand_as(own), own, certain[:, None])
    return mix @ means / mix.sum().clamp_min(TINY)
