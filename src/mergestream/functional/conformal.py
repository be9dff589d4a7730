"""Prediction sets that hold the true class with a chosen chance, also where classes are rarer or more frequent than at
home: split conformal prediction under label shift (Podkopaev and Ramdas 2021).

The score of a class is 1 minus its probability. Shapes: B images, C classes.
"""

import math
from collections.abc import Sequence

import numpy as np

MOST_SCORES = 50  # of a class, in a card
DIGITS = 4


def score_grid(scores: np.ndarray, most: int = MOST_SCORES) -> list[float]:
    """At most so many values that stand for equal parts of the scores [N]: the largest of each part, so never below."""
    ordered = np.sort(scores)
    count = min(most, len(ordered))
    ranks = [math.ceil(len(ordered) * (part + 1) / count) - 1 for part in range(count)]
    return [math.ceil(float(ordered[rank]) * 10**DIGITS) / 10**DIGITS for rank in ranks]


def score_limits(
    scores: Sequence[Sequence[float]], counts: Sequence[int], mix: Sequence[float], coverage: float
) -> list[float]:
    """The largest score [C] with which each class belongs to a prediction set.

    scores: of labelled images, by class; counts [C]: how many images they stand for; mix [C]: the classes' shares where
    the sets are used. A class without labelled images always belongs to the set.
    """
    images = sum(counts)
    weights = [images * share / count if count else math.inf for share, count in zip(mix, counts, strict=True)]
    values = np.concatenate([np.asarray(own, dtype=float) for own in scores])
    masses = np.concatenate(
        [
            np.full(len(own), weight * count / len(own) if count else 0.0)
            for own, weight, count in zip(scores, weights, counts, strict=True)
        ]
    )
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(masses[order])
    # All mass, that of classes without labelled images included; the image itself counts with its class's weight.
    total = images * sum(mix)
    limits = []
    for weight in weights:
        place = int(np.searchsorted(reached, coverage * (total + weight) * (1 - 1e-12)))
        limits.append(float(values[order][place]) if place < len(values) else math.inf)
    return limits


def prediction_sets(probabilities: np.ndarray, limits: Sequence[float]) -> np.ndarray:
    """Which classes belong to each image's set [B,C]; the most probable one always does."""
    chosen = 1 - probabilities <= np.asarray(limits)
    chosen[np.arange(len(probabilities)), probabilities.argmax(axis=1)] = True
    return chosen
