"""Angles, norms and the signal that averaging loses, from sums that add up over tensors."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

Numbers = tuple[float | None, ...]


@dataclass(frozen=True)
class Moments:
    """Squared lengths of K vectors and of their differences. The moments of two tensors add up."""

    numbers: int
    norms: np.ndarray  # [K]
    distances: np.ndarray  # [pairs], in the order of `pairs_of`
    from_base: np.ndarray  # [K + 1]: distances to the base, and the base's own norm last; [0] without a base

    def __add__(self, other: "Moments") -> "Moments":
        fields = zip(vars(self).values(), vars(other).values(), strict=True)
        return Moments(*(mine + theirs for mine, theirs in fields))


@dataclass(frozen=True)
class BaseSpread:
    """Distance of each expert from the shared start, and the angles between their moves; None where undefined."""

    base_norm: float
    norms: tuple[float, ...]  # [K], of Delta = expert - base
    relative_norms: Numbers  # [K], to the base's
    angles: Numbers  # [pairs], degrees, between the Deltas
    mean_angle: float | None


@dataclass(frozen=True)
class Spread:
    """How far apart the experts lie in one group of tensors, flattened to one vector. None where undefined."""

    numbers: int
    norms: tuple[float, ...]  # [K]
    angles: Numbers  # [pairs], degrees
    norm_ratios: Numbers  # [pairs], the larger by the smaller
    mean_angle: float | None
    mean_norm_ratio: float | None
    implied_loss: float | None  # %, from the mean angle
    measured_loss: float | None  # %
    from_base: BaseSpread | None = None


def pairs_of(count: int) -> list[tuple[int, int]]:
    return list(combinations(range(count), 2))


def moments_of(vectors: Tensor, base: Tensor | None = None) -> Moments:
    """Moments of vectors [K,n] and of their differences to base [n], in float64 so that long sums stay exact."""
    vectors = vectors.double()
    # Not from the Gram matrix: its rounding would hide experts that are a hundredth of a degree apart.
    distances = torch.pdist(vectors).square().numpy() if len(vectors) > 1 else np.zeros(0)
    norms = vectors.square().sum(dim=1).numpy()
    from_base = np.zeros(0)
    if base is not None:
        base = base.double()
        from_base = torch.cat([vectors - base, base.unsqueeze(0)]).square().sum(dim=1).numpy()
    return Moments(vectors.shape[1], norms, distances, from_base)


def total(moments: Iterable[Moments]) -> Moments:
    return reduce(Moments.__add__, moments)


def angles_between(norms: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Angles [pairs] in degrees between vectors of lengths [K] at distances [pairs]; NaN if one of the two is zero.

    Kahan's formula is exact near 0 and 180 degrees too, where the arc cosine is not.
    """
    first, second = _ends(norms)
    gap, reach = np.abs(first - second), first + second
    opposite = np.sqrt(np.clip((distances - gap) * (distances + gap), 0, None))
    adjacent = np.sqrt(np.clip((reach - distances) * (reach + distances), 0, None))
    return np.where(np.minimum(first, second) > 0, np.degrees(2 * np.arctan2(opposite, adjacent)), np.nan)


def norm_ratios_of(norms: np.ndarray) -> np.ndarray:
    """Larger divided by smaller length of every pair; NaN if one of the two is zero."""
    first, second = _ends(norms)
    small, large = np.minimum(first, second), np.maximum(first, second)
    return np.divide(large, small, out=np.full_like(small, np.nan), where=small > 0)


def implied_loss(angle: float) -> float:
    """Percent of the length that the mean of two equally long vectors loses at this angle in degrees."""
    return 100 * (1 - float(np.cos(np.radians(angle) / 2)))


def measured_loss(norms: np.ndarray, distances: np.ndarray) -> float:
    """100 (1 - |mean p| / mean |p|) percent, from the lengths [K] and distances [pairs]; NaN if all are zero."""
    count = len(norms)
    squared_sum = count * float(np.square(norms).sum()) - float(np.square(distances).sum())
    length, mean_length = np.sqrt(max(squared_sum, 0.0)) / count, norms.mean()
    return 100 * max(0.0, float(1 - length / mean_length)) if mean_length > 0 else float("nan")


def spread_of(moments: Moments) -> Spread:
    """All quantities of one group of tensors."""
    norms, distances = np.sqrt(moments.norms), np.sqrt(moments.distances)
    angles, ratios = angles_between(norms, distances), norm_ratios_of(norms)
    angle = _mean(angles)
    return Spread(
        numbers=moments.numbers,
        norms=tuple(norms.tolist()),
        angles=_numbers(angles),
        norm_ratios=_numbers(ratios),
        mean_angle=angle,
        mean_norm_ratio=_mean(ratios),
        implied_loss=None if angle is None else implied_loss(angle),
        measured_loss=_number(measured_loss(norms, distances)),
        from_base=_base_spread(moments),
    )


def _base_spread(moments: Moments) -> BaseSpread | None:
    if not len(moments.from_base):
        return None
    lengths = np.sqrt(moments.from_base)
    norms, base = lengths[:-1], float(lengths[-1])
    # The difference of two Deltas is that of their experts: the base cancels.
    angles = angles_between(norms, np.sqrt(moments.distances))
    relative = _numbers(norms / base) if base > 0 else (None,) * len(norms)
    return BaseSpread(base, tuple(norms.tolist()), relative, _numbers(angles), _mean(angles))


def _ends(norms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(pairs_of(len(norms)), dtype=int).reshape(-1, 2)
    return norms[pairs[:, 0]], norms[pairs[:, 1]]


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _numbers(values: np.ndarray) -> Numbers:
    return tuple(_number(value) for value in values)


def _mean(values: np.ndarray) -> float | None:
    defined = values[np.isfinite(values)]
    return float(defined.mean()) if len(defined) else None
