"""Rank correlations over the last axis, also of resamples that are given by counts."""

import numpy as np


def spearman(x: np.ndarray, y: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Spearman's rho of x and y [...,N] over the last axis; NaN where either is constant.

    `counts` [...,N] says how often each point was drawn, so that a bootstrap need not build its resamples.
    """
    times = np.ones(x.shape) if counts is None else counts
    # Mid-ranks less their mean, which is exactly 0 for constant values.
    a, b = (_apply(_signs(values), times) / 2 for values in (x, y))
    return _ratio((times * a * b).sum(axis=-1), (times * a * a).sum(axis=-1), (times * b * b).sum(axis=-1))


def kendall(x: np.ndarray, y: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Kendall's tau-b of x and y [...,N] over the last axis, with `counts` as in `spearman`."""
    times = np.ones(x.shape) if counts is None else counts
    a, b = _signs(x), _signs(y)

    def pairs(signs: np.ndarray) -> np.ndarray:
        return (times * _apply(signs, times)).sum(axis=-1)

    return _ratio(pairs(a * b), pairs(a * a), pairs(b * b))


def _signs(values: np.ndarray) -> np.ndarray:
    """The sign of every difference of two values [...,N] -> [...,N,N]."""
    return np.sign(values[..., :, None] - values[..., None, :])


def _apply(matrix: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """matrix [...,N,N] times vectors [...,N]; one matrix serves all vectors in a single product."""
    return vectors @ matrix.T if matrix.ndim == 2 else (matrix @ vectors[..., None])[..., 0]


def _ratio(joint: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    product = first * second
    defined = product > 0
    return np.where(defined, joint / np.sqrt(np.where(defined, product, 1)), np.nan)
