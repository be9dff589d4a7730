"""Subsets of a target: another share of a class, or classes that never occur."""

from collections.abc import Sequence

import numpy as np

from mergestream.data.streams.stream import Labels, read_labels, seeded_random, shuffled_by_class
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import number, whole_number

# Random numbers of their own, so that a subset does not depend on the order that follows it.
PREVALENCE, MISSING = 1, 2


def prevalence(labels: Labels, *, share: float, positive: int | None = None, seed: int = 0) -> np.ndarray:
    """Ascending indices of as many samples as possible of which `positive` has this share.

    `positive` is by default the last class. The other classes keep their proportions, up to one image. With one seed, a
    smaller share keeps some of the positives of a larger one.
    """
    number("share", share, above=0, below=1)
    values = read_labels(labels)
    positive = int(values.max()) if positive is None else positive
    classes, counts = np.unique(values, return_counts=True)
    mine = classes == positive
    have, rest = int(counts[mine].sum()), int(counts[~mine].sum())
    positives, others = min(have, round(rest * share / (1 - share))), min(rest, round(have * (1 - share) / share))
    if positives == 0 or others == 0:
        raise InputError(
            f"A share of {share:g} cannot be reached: there are {have} images of the class and {rest} others, and at "
            f"least one of each must stay."
        )
    sizes = np.where(mine, positives, _apportioned(np.where(mine, 0, counts), others))
    own = shuffled_by_class(values, seeded_random(seed, PREVALENCE))
    return np.sort(np.concatenate([indices[:size] for indices, size in zip(own, sizes, strict=True)]).astype(np.int64))


def missing(
    labels: Labels, *, count: int | None = None, classes: Sequence[int] | None = None, seed: int = 0
) -> np.ndarray:
    """Ascending indices of all samples but those of some classes: `count` that the seed chooses, or these `classes`."""
    values = read_labels(labels)
    present = np.unique(values)
    if classes is None:
        whole_number("count", count, low=1)
        classes = seeded_random(seed, MISSING).permutation(present)[:count].tolist()
    left = np.flatnonzero(~np.isin(values, classes))
    if not len(left):
        raise InputError(f"Without {len(set(classes))} classes no image is left: these data have {len(present)}.")
    return left


def _apportioned(counts: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to the counts that sum to `total`: those with the largest remainders round up."""
    exact = counts * (total / counts.sum())
    sizes = np.floor(exact + 1e-9).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: total - int(sizes.sum())]] += 1
    return sizes
