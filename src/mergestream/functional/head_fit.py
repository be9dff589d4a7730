"""Fit a last layer to the answers of others by ridge regression, from sums over a stream. Pure functions, fp32.

Shapes: B images, D inputs of the layer, C classes. Products only, no factorisation, so that a CUDA graph can hold them.
"""

import torch
from torch import Tensor

ROUNDS = 16
TINY = 1e-12
LEAST_RIDGE = 1e-5  # of the largest variance: below it rounding decides
NEAR = 0.05  # of the largest logit: what a half type may round in a last layer


def writes_logits(weight: Tensor, bias: Tensor, inputs: Tensor, logits: Tensor) -> bool:
    """Whether a layer (weight [C,D], bias [C]) maps these inputs [B,D] to these logits [B,C]; it reads the device."""
    return bool((inputs @ weight.T + bias - logits).abs().amax() <= NEAR * logits.abs().amax())


def sums(inputs: Tensor, answers: Tensor, shares: Tensor) -> Tensor:
    """Means over a batch [1+D,1+D+C] for the fit: products of 1 and the inputs with each other and with the answers.

    `shares` [B] are the weights of images.
    """
    ones = torch.ones_like(inputs[:, :1])
    left = torch.cat([ones, inputs], dim=1)
    return (left * shares[:, None]).T @ torch.cat([left, answers], dim=1)


def fitted(sums: Tensor, start: Tensor, bias: Tensor, before: float, guess: Tensor) -> tuple[Tensor, Tensor]:
    """The change of a weight `start` [C,D] that brings its answers closest to the others', and the bias [C].

    From sums [1+D,1+D+C] over images; the start counts as much as `before` images whose inputs vary in all directions
    alike. `guess` [C,D] is where the search begins: the change of the last fit. Before the first image the result is
    no change and the layer's own `bias` [C].
    """
    inputs = start.shape[1]
    mean = sums / sums[:1, :1].clamp_min(TINY)
    middle, target = mean[0, 1 : 1 + inputs], mean[0, 1 + inputs :]
    together = mean[1:, 1 : 1 + inputs] - middle[:, None] * middle
    across = mean[1:, 1 + inputs :].T - target[:, None] * middle  # [C,D]
    spread = together.diagonal()
    ridge = before / sums[0, 0].clamp_min(1.0) * spread.mean()
    ridge = torch.maximum(ridge, LEAST_RIDGE * spread.amax()).clamp_min(TINY)
    change = conjugate_gradients(together, ridge, across - start @ together, guess)
    any_images = sums[0, 0] > 0
    return torch.where(any_images, change, 0.0), torch.where(any_images, target - (start + change) @ middle, bias)


def conjugate_gradients(matrix: Tensor, ridge: Tensor, right: Tensor, guess: Tensor, rounds: int = ROUNDS) -> Tensor:
    """x [C,D] with x (matrix + ridge) = right; matrix [D,D] is a covariance. Some steps from a guess."""
    bent_by = matrix + torch.diag_embed(ridge.expand(len(matrix)))
    scale = 1 / bent_by.diagonal().clamp_min(TINY)
    x = guess
    rest = right - x @ bent_by
    step = rest * scale
    size = torch.linalg.vecdot(rest, step)[:, None]
    for _ in range(rounds):
        image = step @ bent_by
        bent = torch.linalg.vecdot(step, image)[:, None]
        # Rounding can leave a direction without curvature: no step along it.
        length = torch.where(bent > 0, size / bent.clamp_min(TINY**2), 0.0)
        x = torch.addcmul(x, length, step)
        rest = torch.addcmul(rest, length, image, value=-1)
        prepared = rest * scale
        smaller = torch.linalg.vecdot(rest, prepared)[:, None]
        step = torch.addcmul(prepared, smaller / size.clamp_min(TINY**2), step)
        size = smaller
    return x
