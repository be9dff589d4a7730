"""Hierarchical bootstrap of paired differences: targets, then training seeds, stream seeds, and groups or batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from mergestream.functional.intervals import FEW_BATCHES, percentiles, ranked, seed_of

RESAMPLES = 1000
MOST_UNITS = 1000  # of longer streams, neighbouring batches are resampled together: a draw needs memory for each unit
SMALLEST = 2.0**-24  # the smallest probability that half precision stores
Tree = dict[str, dict[str, list[np.ndarray]]]  # by target and pool, an array per stream
Terms = tuple[np.ndarray, np.ndarray, np.ndarray]  # numerators and denominators [K,M,U], offsets [K]


@dataclass(frozen=True, eq=False)
class NestedRun:
    """Answers of one method at one target, from a pool of one training seed, on a stream of one stream seed.

    `units` [N] number what is resampled as a whole: the image's slide or patient (`unit` is "group"), or its batch.
    Groups have the same numbers in every run of a target.
    """

    target: str
    training_seed: str
    stream_seed: int
    labels: np.ndarray  # [N]
    predictions: np.ndarray  # [N]
    probabilities: np.ndarray  # [N,C]
    units: np.ndarray  # [N]
    unit: str = "batch"
    _drawn: dict[tuple[str, int], np.ndarray] = field(default_factory=dict, repr=False)

    def scores(self, metric: str, resamples: int = RESAMPLES) -> np.ndarray:
        """The metric as it is, then under every draw of units [1+resamples]; NaN where it is not defined."""
        key = metric, resamples
        if key not in self._drawn:
            units, counts = self._counts(resamples)
            whole = np.ones((1, counts.shape[1]))
            self._drawn[key] = _evaluate(_terms(self, metric, units), np.concatenate([whole, counts]))
        return self._drawn[key]

    def _counts(self, resamples: int) -> tuple[np.ndarray, np.ndarray]:
        """The unit of each image [N], and how often each unit counts [resamples,U]; few batches: images in them too."""
        total = int(self.units.max()) + 1
        if total > MOST_UNITS:
            return self.units * MOST_UNITS // total, _unit_counts(MOST_UNITS, resamples, self.target)
        if self.unit != "batch" or total >= FEW_BATCHES:
            return self.units, _unit_counts(total, resamples, self.target)
        random, parts = np.random.default_rng(seed_of(self.target)), []
        batches = _unit_counts(total, resamples, self.target)
        order = np.argsort(self.units, kind="stable")
        for batch, size in enumerate(np.bincount(self.units)):
            parts.append(random.multinomial((batches[:, batch] * size).astype(int), np.full(size, 1 / size)))
        images = np.empty_like(order)
        images[order] = np.arange(len(order))
        return images, np.concatenate(parts, axis=1).astype(float)


@dataclass(frozen=True)
class PairedDifference:
    """Ours less theirs: per target, and draws [R] of the mean over targets and of the lowest target.

    `mean_draws` resample targets as well, `fixed_draws` and `worst_draws` keep these targets: the lowest of a draw that
    lacks the worst target would say nothing of it. `levels` name what was resampled.
    """

    by_target: dict[str, float]
    mean_draws: np.ndarray
    fixed_draws: np.ndarray
    worst_draws: np.ndarray
    levels: tuple[str, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.by_target.values())))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean over targets; its lower end is the one-sided 97.5 % lower limit as well."""
        return percentiles(self.mean_draws)


def hierarchical_difference(
    ours: Sequence[NestedRun],
    theirs: Sequence[NestedRun],
    metric: str,
    *,
    lower_is_better: bool = False,
    resamples: int = RESAMPLES,
) -> PairedDifference | None:
    """Bootstrap the difference of two methods' paired runs; None where a run does not define the metric.

    Runs are paired by their place in the two lists. Each resample draws targets, in each of them pools, in each pool
    stream seeds, all with replacement, and one draw of units for all runs of a target: they share its images, so more
    pools or streams do not narrow what images leave open. A level with one element is not resampled. For a metric where
    lower is better, the lowest target is the one with the highest difference.
    """
    tree: Tree = {}
    for mine, other in zip(ours, theirs, strict=True):
        gaps = mine.scores(metric, resamples) - other.scores(metric, resamples)
        if np.isnan(gaps[0]):
            return None
        gaps = _without_gaps(gaps)
        # Batches of two streams have nothing in common but their images: in sorted order they err together.
        drawn = np.sort(gaps[1:]) if mine.unit == "batch" else gaps[1:]
        pools = tree.setdefault(mine.target, {})
        pools.setdefault(mine.training_seed, []).append(np.concatenate([gaps[:1], drawn]))
    units = dict.fromkeys(f"{run.unit}es" if run.unit == "batch" else f"{run.unit}s" for run in ours)
    return resample_tree(tree, " or ".join(units), lower_is_better=lower_is_better)


def resample_tree(tree: Tree, units: str, *, lower_is_better: bool = False) -> PairedDifference:
    """Resample targets, pools and streams; each run gives its difference and draws of `units` [1+R]."""
    random = np.random.RandomState(1)
    targets = {name: _target_draws(random, list(pools.values())) for name, pools in tree.items()}
    points = {name: float(drawn[0]) for name, drawn in targets.items()}
    draws = np.stack([random.permutation(drawn[1:]) for drawn in targets.values()])  # [T,R]
    worst = draws.max(axis=0) if lower_is_better else draws.min(axis=0)
    return PairedDifference(points, _across_targets(random, draws), draws.mean(axis=0), worst, _levels(tree, units))


def _without_gaps(values: np.ndarray) -> np.ndarray:
    """Draws in which a class is absent leave AUROC undefined: defined ones take their place, in turn."""
    undefined = np.isnan(values)
    return np.where(undefined, np.resize(values[~undefined], len(values)), values) if undefined.any() else values


def _target_draws(random: np.random.RandomState, pools: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """One target's difference, then its draws [1+R]: pools drawn with replacement, and streams in each of them."""
    point = np.mean([np.mean([gaps[0] for gaps in streams]) for streams in pools])
    drawn = [np.stack(streams)[:, 1:] for streams in pools]  # [S,R] per pool
    resamples = drawn[0].shape[1]
    columns, total = np.arange(resamples), np.zeros(resamples)
    for _ in pools:
        # Every pool with streams of its own choice, of which this slot takes one.
        every = np.stack([_mean_of_picks(random, gaps) for gaps in drawn])
        total += every[random.randint(len(pools), size=resamples), columns]
    return np.concatenate([[point], total / len(pools)])


def _mean_of_picks(random: np.random.RandomState, values: np.ndarray) -> np.ndarray:
    """Mean over as many rows of values [S,R] as there are, drawn with replacement in every column [R]."""
    rows = random.randint(len(values), size=values.shape)
    picked: np.ndarray = np.take_along_axis(values, rows, axis=0)
    return np.asarray(picked.mean(axis=0))


def _across_targets(random: np.random.RandomState, draws: np.ndarray) -> np.ndarray:
    """Means [R] over targets drawn with replacement from draws [T,R], each with a draw of its own."""
    count, resamples = draws.shape
    if count == 1:
        return np.asarray(draws[0])
    places = np.stack([random.permutation(resamples) for _ in range(count)])
    return np.asarray(draws[random.randint(count, size=(count, resamples)), places].mean(axis=0))


def _levels(tree: Tree, units: str) -> tuple[str, ...]:
    """Names of the levels with more than one element, from the top."""
    pools = [pool for target in tree.values() for pool in target.values()]
    several = {
        "targets": len(tree) > 1,
        "training seeds": any(len(target) > 1 for target in tree.values()),
        "stream seeds": any(len(streams) > 1 for streams in pools),
        units: True,
    }
    return tuple(level for level, is_resampled in several.items() if is_resampled)


@lru_cache(maxsize=64)  # one entry per target and number of units; methods, streams and metrics share them
def _unit_counts(total: int, resamples: int, key: str) -> np.ndarray:
    """How often each of the units is drawn with replacement [resamples,total]."""
    random = np.random.RandomState(seed_of(key))
    return random.multinomial(total, np.full(total, 1 / total), size=resamples).astype(float)


def _evaluate(terms: Terms, counts: np.ndarray) -> np.ndarray:
    """A metric under unit counts [R,U]: the mean over K of the sum over M of ratios, less an offset."""
    numerators, denominators, offsets = terms
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.einsum("kmu,ru->rkm", numerators, counts, optimize=True)
        ratios /= np.einsum("kmu,ru->rkm", denominators, counts, optimize=True)
    parts = ratios.sum(axis=2) - offsets
    defined = ~np.isnan(parts)
    number = defined.sum(axis=1)
    total = np.where(defined, parts, 0.0).sum(axis=1)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def _terms(run: NestedRun, metric: str, units: np.ndarray) -> Terms:
    """A metric as ratios of sums over units; AUROC to first order, by each image's share of pairs won (DeLong)."""
    labels, count, total = run.labels, run.probabilities.shape[1], int(units.max()) + 1
    classes = np.flatnonzero(np.bincount(labels, minlength=count))

    def by_unit(values: np.ndarray) -> np.ndarray:
        return np.bincount(units, weights=values, minlength=total)

    if metric == "auroc":
        return _auroc_terms(run, by_unit, classes)
    right = run.predictions == labels
    if metric == "balanced_accuracy":
        pairs = [(right & (labels == c), labels == c) for c in classes]
    else:
        pairs = [(_image_scores(run, metric, right), np.ones(len(labels)))]
    numerators, denominators = (np.stack([by_unit(pair[i])[None] for pair in pairs]) for i in (0, 1))
    return numerators, denominators, np.zeros(len(pairs))


def _image_scores(run: NestedRun, metric: str, right: np.ndarray) -> np.ndarray:
    """What each image adds to a metric that is a mean over images [N]."""
    own = run.probabilities[np.arange(len(run.labels)), run.labels].astype(float)
    if metric == "nll":
        return np.asarray(-np.log(np.maximum(own, SMALLEST)))
    if metric == "brier":
        return np.asarray((run.probabilities.astype(float) ** 2).sum(axis=1) - 2 * own + 1)
    if metric == "accuracy":
        return right.astype(float)
    raise ValueError(metric)


def _auroc_terms(run: NestedRun, by_unit: Callable[[np.ndarray], np.ndarray], classes: np.ndarray) -> Terms:
    """One class against the rest: the mean share won by its images, plus that by the others, less the AUROC itself."""
    values = ranked(torch.from_numpy(run.probabilities)).numpy()
    # With two classes the other one is the mirror image; with one there is nothing to rank.
    ranking = classes[1:] if values.shape[1] == 2 or len(classes) < 2 else classes
    numerators, denominators, offsets = [], [], []
    for c in ranking:
        positive = run.labels == c
        won = _shares_won(values[:, c], positive)
        numerators.append([by_unit(won * side) for side in (positive, ~positive)])
        denominators.append([by_unit(side.astype(float)) for side in (positive, ~positive)])
        offsets.append(won[positive].mean())
    if not offsets:
        empty = by_unit(np.zeros(len(run.labels)))
        return np.stack([[empty]]), np.stack([[empty]]), np.zeros(1)
    return np.array(numerators), np.array(denominators), np.array(offsets)


def _shares_won(values: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """For a positive the share of negatives below, for a negative that of positives above; equals count half [N]."""
    _, place = np.unique(values, return_inverse=True)
    positives, negatives = (np.bincount(place[side], minlength=place.max() + 1) for side in (positive, ~positive))
    below = (np.cumsum(negatives) - negatives / 2) / negatives.sum()
    above = 1 - (np.cumsum(positives) - positives / 2) / positives.sum()
    return np.asarray(np.where(positive, below[place], above[place]))
