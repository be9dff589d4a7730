"""Mixes of classes, and answers under another mix. Pure functions of fp32 tensors.

Shapes: B images, C classes. `shares` [B] are the weights of images in a mean, as in `scores`; padding has 0.
"""

import torch
from torch import Tensor

LEAST = 1e-4  # the smallest share of a class


def as_mix(values: Tensor) -> Tensor:
    """Class shares [C] that sum to 1 and are never quite 0."""
    values = (values / values.sum()).clamp_min(LEAST)
    return values / values.sum()


def counted(shares: Tensor | None, images: Tensor) -> Tensor:
    """The weight [B] of each of the images [B,...] in a mean."""
    return torch.full((len(images),), 1 / len(images), device=images.device) if shares is None else shares


def reweighted(probabilities: Tensor, mix: Tensor, assumed: Tensor) -> Tensor:
    """Posteriors [B,C] under `mix`, of a classifier that answers for the mix `assumed` (Bayes)."""
    joint = probabilities * (mix / assumed)
    return joint / joint.sum(dim=-1, keepdim=True)
