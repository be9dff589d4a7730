"""Coefficients on the simplex, from scores. Pure functions of fp32 tensors [K]; a lower score is better."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mergestream.runtime.errors import InputError


def uniform(count: int, device: torch.device | str = "cpu") -> Tensor:
    """1/K each."""
    return torch.full((count,), 1 / count, device=device)


def one_hot(index: int | Tensor, count: int, device: torch.device | str = "cpu") -> Tensor:
    """e_k, without reading a device scalar back to the host."""
    return (torch.arange(count, device=device) == index).float()


def inverse(scores: Tensor, epsilon: float) -> Tensor:
    """a_k = (E_k + eps)^-1 / sum_j (E_j + eps)^-1 (Eq. 4)."""
    evidence = 1 / (scores + epsilon)
    return evidence / evidence.sum()


def softmax(scores: Tensor, sharpness: float) -> Tensor:
    """The alternative to Eq. 4: softmax_k(-sharpness * E_k)."""
    return torch.softmax(-sharpness * scores, dim=0)


def head_expert(scores: Tensor, consistency: Tensor | None, epsilon: float) -> Tensor:
    """k* = argmax_k (1 / (E_k + eps)) * (1 + C_k) (Eq. 8), as an index [] on the device.

    Where the evidence ties, as it does when scores are tiny beside eps, the lower score decides, never the order.
    """
    evidence = 1 / (scores + epsilon)
    evidence = evidence if consistency is None else evidence * (1 + consistency)
    return torch.where(evidence == evidence.max(), scores, torch.inf).argmin()


def entropy_gap(scores: Tensor, chosen: Tensor, sharpness: float) -> Tensor:
    """h_k = softmax_k(-tau_h * |E_k - E_k*|) (Eq. 9)."""
    # gather, not indexing: a device scalar used as an index would synchronise with the host.
    gap = (scores - scores.gather(0, chosen.reshape(1))).abs()
    return torch.softmax(-sharpness * gap, dim=0)


def select(scores: Tensor, chosen: Tensor) -> Tensor:
    """The limit tau_h -> infinity of Eq. 9: one-hot k*, shared equally by experts whose score ties exactly."""
    nearest = (scores == scores.gather(0, chosen.reshape(1))).float()
    return nearest / nearest.sum()


def smooth(previous: Tensor, current: Tensor, momentum: float) -> Tensor:
    """The exponential moving average: mu * old + (1 - mu) * new. At momentum 0 it is `current`, bit for bit."""
    return current if momentum == 0 else momentum * previous + (1 - momentum) * current


def effective_number(coefficients: Tensor) -> Tensor:
    """exp of the coefficients' entropy: K where they are uniform, 1 where one expert takes all."""
    return torch.special.entr(coefficients).sum(dim=-1).exp()


def on_simplex(values: Sequence[float] | Tensor, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Convert a user's coefficients to fp32 [K]; refuse them unless non-negative, finite and summing to 1."""
    try:
        result = torch.as_tensor(values, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"Expected {count} coefficients, one number per expert, got {values!r}.") from None
    if result.shape != (count,):
        raise InputError(f"Expected {count} coefficients, one per expert, got shape {tuple(result.shape)}.")
    if not bool(torch.isfinite(result).all()) or bool((result < 0).any()) or abs(float(result.sum()) - 1) > 1e-4:
        raise InputError(f"Coefficients must be finite, at least 0 and sum to 1; got {result.tolist()}.")
    return result
