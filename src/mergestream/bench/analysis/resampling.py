"""Resampling of batches for statistics other than accuracy; otherwise as in `functional.intervals`."""

from collections.abc import Sequence

import numpy as np

from mergestream.bench.analysis.comparison import Estimate
from mergestream.functional.intervals import by_target, percentiles, target_mean

RESAMPLES = 1000


def batch_counts(random: np.random.RandomState, batches: int) -> np.ndarray:
    """How often each batch is drawn [RESAMPLES,T]."""
    return random.multinomial(batches, np.full(batches, 1 / batches), size=RESAMPLES)


def estimate_over_targets(points: Sequence[float], draws: np.ndarray, targets: Sequence[str]) -> Estimate:
    """Mean over targets of values [R], with the interval of their resamples [R,RESAMPLES], runs of a target tied."""
    low, high = percentiles(by_target(draws, targets).mean(axis=0))
    return Estimate(target_mean(points, targets), low, high)
