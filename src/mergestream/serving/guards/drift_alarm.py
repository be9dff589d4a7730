"""The arithmetic of the drift alarm: has a series left its level for good?

Self-starting CUSUM (Page 1954, Hawkins 1987): a batch is compared with all batches before it, in units of their
deviations. Two series are watched: the mean entropy of the merged model's answers, in both directions, and the distance
(chi-square) of its class histogram from the one so far, upwards. What one batch adds is bounded, so that no single odd
batch raises the alarm; the sum is bounded, so that the alarm ends when the stream returns. While it lasts the reference
is frozen; resetting the stream accepts the new level.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mergestream.serving.guards.findings import GuardSettings

MOST_A_BATCH_ADDS = 4.0
Counts = tuple[int, ...]


@dataclass(frozen=True)
class Cusum:
    """One watched series: its level so far, squared deviations, and the two sums."""

    batches: int = 0
    images: int = 0
    level: float = 0.0
    squares: float = 0.0
    up: float = 0.0
    down: float = 0.0

    def standing_at(self, limit: float) -> bool:
        return max(self.up, self.down) > limit

    def counted(self, off: float, settings: GuardSettings) -> "Cusum":
        """off: how many standard deviations the batch lay above the level."""
        bounded = max(-MOST_A_BATCH_ADDS, min(MOST_A_BATCH_ADDS, off))
        most = 2 * settings.drift_limit
        up = min(most, max(0.0, self.up + bounded - settings.drift_slack))
        down = min(most, max(0.0, self.down - bounded - settings.drift_slack))
        return replace(self, up=up, down=down)


def level_shift(series: Cusum, value: float, images: int, settings: GuardSettings) -> Cusum:
    """One more batch of a series of means, such as the answers' mean entropy."""
    if not series.batches:
        return Cusum(1, images, value)
    off = (value - series.level) / math.sqrt(1 / images + 1 / series.images)
    if _settled(series, settings) and series.squares > 0:
        series = series.counted(off / math.sqrt(series.squares / (series.batches - 1)), settings)
    if series.standing_at(settings.drift_limit):
        return series
    total = series.images + images
    level = series.level + (value - series.level) * images / total
    return replace(series, batches=series.batches + 1, images=total, level=level, squares=series.squares + off**2)


def mixture_shift(series: Cusum, reference: Counts, said: Counts, settings: GuardSettings) -> tuple[Cusum, Counts]:
    """One more batch's histogram [C] against the reference [C], which it joins unless the alarm stands."""
    images, classes = sum(said), len(said)
    if not series.batches:
        return Cusum(1, images), said
    off = chi_square(said, reference) / (classes - 1)
    if _settled(series, settings) and series.level > 0:
        # Streams that come in runs of one class are always off: their own level is the unit.
        series = series.counted((off / series.level - 1) * math.sqrt((classes - 1) / 2), settings)
        series = replace(series, down=0.0)
    if series.standing_at(settings.drift_limit):
        return series, reference
    level = series.level + (off - series.level) / series.batches
    grown = replace(series, batches=series.batches + 1, images=series.images + images, level=level)
    return grown, tuple(np.add(reference, said).tolist())


def _settled(series: Cusum, settings: GuardSettings) -> bool:
    """Whether the reference is good enough to measure by: batches may be single images."""
    return series.batches >= settings.drift_after and series.images >= settings.fewest


def chi_square(counts: Sequence[int], reference: Sequence[int]) -> float:
    """How far counts [C] lie from those expected by a reference [C]; about C - 1 where both are of one source."""
    now, before = np.asarray(counts, dtype=float), np.asarray(reference, dtype=float)
    expected = (before + 0.5) / (before.sum() + 0.5 * len(before))
    spread = now.sum() * (1 + now.sum() / before.sum())
    return float((((now - now.sum() * expected) ** 2) / (spread * expected)).sum())
