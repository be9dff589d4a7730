"""A last layer that answers as others do, fitted to sums over a stream: ridge regression. Pure functions, fp32.

Shapes: B images, D inputs of the layer, C classes. Products alone, no factorisation: a CUDA graph holds them.
"""

import torch
from torch import Tensor

ROUNDS = 16
TINY = 1e-12


def sums(inputs: Tensor, answers: Tensor, shares: Tensor) -> Tensor:
    """What a fit needs of a batch, as means over it [1+D,1+D+C]: products of 1 and the inputs with each other and with
    the answers. `shares` [B] say what each image counts."""
    ones = torch.ones_like(inputs[:, :1])
    left = torch.cat([ones, inputs], dim=1)
    return (left * shares[:, None]).T @ torch.cat([left, answers], dim=1)


def fitted(sums: Tensor, start: Tensor, before: float, guess: Tensor) -> tuple[Tensor, Tensor]:
    """The change of a weight `start` [C,D] that brings its answers nearest to the others', and the bias [C].

    From sums [1+D,1+D+C] over images; the start counts as much as `before` images whose inputs vary in all directions
    alike. `guess` [C,D] is where the search begins: the change that was found last.
    """
    inputs = start.shape[1]
    mean = sums / sums[:1, :1].clamp_min(TINY)
    middle, wanted = mean[0, 1 : 1 + inputs], mean[0, 1 + inputs :]
    together = mean[1:, 1 : 1 + inputs] - middle[:, None] * middle
    across = mean[1:, 1 + inputs :].T - wanted[:, None] * middle  # [C,D]
    ridge = (before / sums[0, 0].clamp_min(1.0) * together.diagonal().mean()).clamp_min(TINY)
    change = conjugate_gradients(together, ridge, across - start @ together, guess)
    return change, wanted - (start + change) @ middle


def conjugate_gradients(matrix: Tensor, ridge: Tensor, right: Tensor, guess: Tensor) -> Tensor:
    """x [C,D] with x (matrix + ridge) = right; matrix [D,D] is a covariance. ROUNDS steps from a guess."""
    scale = 1 / (matrix.diagonal().clamp_min(0.0) + ridge)
    x = guess
    rest = right - x @ matrix - ridge * x
    step = rest * scale
    size = (rest * step).sum(dim=1, keepdim=True)
    for _ in range(ROUNDS):
        image = step @ matrix + ridge * step
        length = size / (step * image).sum(dim=1, keepdim=True).clamp_min(TINY**2)
        x = x + length * step
        rest = rest - length * image
        prepared = rest * scale
        smaller = (rest * prepared).sum(dim=1, keepdim=True)
        step = prepared + smaller / size.clamp_min(TINY**2) * step
        size = smaller
    return x
