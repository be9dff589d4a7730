"""Answers that agree between neighbours, as LAME computes them (Boudiaf et al. 2022). Pure functions of tensors.

Shapes: B images, C classes, D features. `present` [B] is 1 for an image and 0 for padding.
"""

import torch
from torch import Tensor

ROUNDS, SETTLED = 100, 1e-8  # at most so many rounds; fewer once the energy changes by less than this share


def affinity(features: Tensor, neighbours: int, present: Tensor) -> Tensor:
    """W [B,B] in fp64: 1/2 for each direction in which one image is among the nearest of the other."""
    unit = torch.nn.functional.normalize(features.double(), dim=-1)
    near = unit @ unit.T  # the larger the product of unit vectors, the smaller their distance
    excluded = (present[:, None] * present) == 0
    near = near.masked_fill(excluded | torch.eye(len(unit), dtype=torch.bool, device=unit.device), -torch.inf)
    nearest = near.topk(min(neighbours, len(unit) - 1), dim=1)
    chosen = torch.zeros_like(near).scatter(1, nearest.indices, nearest.values.isfinite().double())
    return (chosen + chosen.T) / 2


def agreed(log_answers: Tensor, weights: Tensor, present: Tensor) -> Tensor:
    """The logarithm of Y [B,C] with Y = softmax(log p + W Y), from log p [B,C] and W [B,B], in fp64.

    The rounds after the one that settles change nothing: they are there for CUDA graphs, which cannot stop early.
    """
    unary = log_answers.double()
    result, energy = unary, torch.zeros((), dtype=unary.dtype, device=unary.device)
    settled = torch.zeros((), dtype=torch.bool, device=unary.device)
    for number in range(ROUNDS):
        pull = weights @ result.exp()
        moved = torch.log_softmax(unary + pull, dim=-1)
        previous, energy = energy, _energy(moved, unary, pull, present)
        result = torch.where(settled, result, moved)
        if number > 1:
            settled = settled | ((energy - previous).abs() <= SETTLED * previous.abs())
    return result


def _energy(answers: Tensor, unary: Tensor, pull: Tensor, present: Tensor) -> Tensor:
    """What the rounds lower []: the sum over images of Y (log Y - log p - W Y)."""
    return ((answers.exp() * (answers - unary - pull)).sum(dim=-1) * present).sum()
