"""RegMean (Jin et al. 2023): the linear map whose outputs are nearest to all experts' outputs on their own inputs."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Rounding of a Gram matrix, per input. A direction below it is noise: no expert's inputs reach it.
ROUNDING = {torch.float32: 1e-7, torch.float64: 1e-14}


def merge_layer(grams: Sequence[Tensor], weights: Sequence[Tensor], *, ratio: float, ridge: float) -> Tensor:
    """Merge one linear map or convolution from every expert's Gram matrix [groups,in,in] and weight."""
    groups, _, inputs = grams[0].shape
    stacked = torch.stack([weight.reshape(groups, -1, inputs) for weight in weights])
    stacked_grams = torch.stack([gram.to(stacked.device) for gram in grams])
    return regression_mean(stacked, stacked_grams, ratio=ratio, ridge=ridge).reshape(weights[0].shape)


def regression_mean(weights: Tensor, grams: Tensor, *, ratio: float, ridge: float) -> Tensor:
    """argmin_W sum_k |X_k (W - W_k)^T|^2 in closed form. weights [K,g,out,in], grams [K,g,in,in] -> [g,out,in].

    ratio: off-diagonal elements of every Gram matrix are multiplied by it. ridge: added to every diagonal.

    Solves for the difference from the plain mean, which is the same equation: directions that no input reaches keep
    the mean.
    """
    mean = weights.double().mean(dim=0)
    left = torch.zeros_like(grams[0], dtype=torch.float64)
    right = torch.zeros_like(mean).transpose(-1, -2)
    for weight, gram in zip(weights, grams, strict=True):
        shrunk = gram * ratio
        torch.diagonal(shrunk, dim1=-2, dim2=-1).copy_(torch.diagonal(gram, dim1=-2, dim2=-1))
        left += shrunk
        # A ridge pulls every expert equally, so it drops out of the right-hand side.
        right = right + shrunk @ (weight.double() - mean).to(gram.dtype).transpose(-1, -2)
    torch.diagonal(left, dim1=-2, dim2=-1).add_(len(weights) * ridge)
    difference = _solve(left, right, ROUNDING.get(grams.dtype, ROUNDING[torch.float32]) * left.shape[-1])
    return (mean + difference.transpose(-1, -2)).to(weights.dtype)


def _solve(left: Tensor, right: Tensor, negligible: float) -> Tensor:
    """The smallest solution of a symmetric positive semi-definite system. left [g,n,n], right [g,n,m]."""
    diagonal = torch.diagonal(left, dim1=-2, dim2=-1)
    # An input that is always 0 has zeros in its row, column and right-hand side: any pivot works.
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    scaled = left * scale[..., None] * scale[..., None, :]
    torch.diagonal(scaled, dim1=-2, dim2=-1).fill_(1)
    factor, failed = torch.linalg.cholesky_ex(scaled)
    pivots = torch.diagonal(factor, dim1=-2, dim2=-1).square()
    if bool((failed == 0).all()) and bool((pivots > negligible).all()):
        return scale[..., None] * torch.cholesky_solve(scale[..., None] * right, factor)
    solved = [_smallest(*system, negligible) for system in zip(scaled, scale, right, strict=True)]
    return torch.stack(solved)


def _smallest(scaled: Tensor, scale: Tensor, right: Tensor, negligible: float) -> Tensor:
    """Solve one singular system; scaled = S left S [n,n] has a diagonal of 1: small inputs count like large ones."""
    values, vectors = torch.linalg.eigh(scaled)
    reached = values > negligible * values.amax()
    inverse = torch.where(reached, 1 / values, 0.0)
    solution = scale[:, None] * (vectors @ (inverse[:, None] * (vectors.T @ (scale[:, None] * right))))
    # Any multiple of these directions solves the system too; the smallest solution has none of them.
    free = torch.linalg.qr(scale[:, None] * vectors[:, ~reached]).Q
    return solution - free @ (free.T @ solution)
