"""Bootstrap intervals of metrics that resample whole batches, or whole units such as slides or patients."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mergestream.functional.metrics import score_of

LEVEL = 0.95
# With fewer batches, a bootstrap over batches alone is far too narrow; one batch has no width at all.
FEW_BATCHES = 10


def mean_with_interval(
    runs: Sequence[np.ndarray], metric: str, *, targets: Sequence[str] | None = None, resamples: int = 1000
) -> tuple[float, float, float]:
    """Mean of a metric over targets, with the 95 % percentile interval of a bootstrap over each run's batches.

    runs: confusion matrices per batch [T,C,C], one array per run. Batches are the unit because one merged model answers
    a whole batch, so its errors are not independent; if a run has few batches, images inside them are resampled too.
    Runs with the same target share its images, whatever their seed or pool: they are averaged first, and more of them
    do not narrow the interval. Without `targets` every run is its own target.
    """
    scores = np.array([score_of(matrices.sum(axis=0), metric) for matrices in runs])
    return target_mean(scores, targets), *percentiles(
        by_target(resampled(runs, metric, resamples), targets).mean(axis=0)
    )


def target_mean(values: Sequence[float] | np.ndarray, targets: Sequence[str] | None) -> float:
    """Mean over targets of the mean over each target's runs."""
    if targets is None:
        return float(np.mean(values))
    _, place = np.unique(np.asarray(targets), return_inverse=True)
    return float(np.mean(np.bincount(place, weights=np.asarray(values)) / np.bincount(place)))


def by_target(resampled: np.ndarray, targets: Sequence[str] | None) -> np.ndarray:
    """Resampled scores of runs [R,resamples] -> of targets [G,resamples].

    The errors of a target's runs count as fully correlated: their resamples are averaged in sorted order, which keeps
    the width of one run. Targets are independent, so each one's order is shuffled again.
    """
    names, place = np.unique(np.arange(len(resampled)) if targets is None else np.asarray(targets), return_inverse=True)
    random = np.random.RandomState(2)
    groups = []
    for group in range(len(names)):
        mine = resampled[place == group]
        together = np.sort(mine, axis=1).mean(axis=0)
        groups.append(mine[0] if len(mine) == 1 else together[random.permutation(len(together))])
    return np.stack(groups)


def resampled(runs: Sequence[np.ndarray], metric: str, resamples: int = 1000) -> np.ndarray:
    """Scores [R,resamples] under bootstrap resamples of batches; equal numbers of batches give equal resamples."""
    random = np.random.RandomState(0)
    scores = []
    for matrices in runs:
        picks = random.multinomial(len(matrices), np.full(len(matrices), 1 / len(matrices)), size=resamples)
        drawn = (
            np.tensordot(picks, matrices, axes=1) if len(matrices) >= FEW_BATCHES else _images(random, picks, matrices)
        )
        scores.append(score_of(drawn, metric))
    return np.stack(scores)


def _images(random: np.random.RandomState, picks: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """Confusion matrices [resamples,C,C] with the images inside each picked batch resampled too."""
    classes, sizes = matrices.shape[-1], matrices.sum(axis=(1, 2))
    generator = np.random.default_rng(random.randint(2**31))
    cells = [generator.multinomial(picks[:, t] * size, matrices[t].reshape(-1) / size) for t, size in enumerate(sizes)]
    return np.sum(cells, axis=0).reshape(-1, classes, classes)


def percentiles(values: np.ndarray) -> tuple[float, float]:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


RESAMPLES = 500
ATTEMPTS = 100  # rounds of draws, before too many of them lack a class


def seed_of(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")


def unit_draws(labels: np.ndarray, units: np.ndarray, key: str, count: int = RESAMPLES) -> np.ndarray:
    """How often each image counts in `count` draws of whole units with replacement [count,N].

    The draws depend on labels [N], units [N] (numbers from 0) and the `key` (data set and target) alone: methods,
    streams and seeds share them, so that differences are paired and several seeds on the same images do not narrow an
    interval. A draw that lacks a class is drawn again: its scores would be of another kind.
    """
    random = np.random.RandomState(seed_of(key))
    total = int(units.max()) + 1
    members = np.zeros((total, int(labels.max()) + 1))
    np.add.at(members, (units, labels), 1)
    present = members.sum(axis=0) > 0
    accepted: list[np.ndarray] = []
    for _ in range(ATTEMPTS):
        draws = random.multinomial(total, np.full(total, 1 / total), size=count)
        accepted += [draw for draw in draws if ((draw @ members) > 0)[present].all()]
        if len(accepted) >= count:
            return np.stack(accepted[:count])[:, units]
    raise ValueError(f"Too few of {total} units hold each class: most draws lack one.")


def drawn_scores(
    probabilities: Tensor, predictions: Tensor, labels: Tensor, draws: Tensor, metrics: Sequence[str]
) -> dict[str, Tensor]:
    """Every metric under every draw [R]. probabilities: [N,C], predictions and labels: [N], draws: float64 [R,N]."""
    truth = torch.nn.functional.one_hot(labels, probabilities.shape[1]).double()
    hits = truth * (predictions == labels)[:, None]
    functions: dict[str, Callable[[], Tensor]] = {
        "accuracy": lambda: (draws @ hits).sum(dim=1) / draws.sum(dim=1),
        "balanced_accuracy": lambda: torch.nanmean((draws @ hits) / (draws @ truth), dim=1),
        "auroc": lambda: _macro_auroc(ranked(probabilities), truth, draws),
    }
    return {metric: functions[metric]() for metric in metrics}


def ranked(probabilities: Tensor) -> Tensor:
    """Values in the order of the probabilities, also near 1, where half precision rounds: the others' sum has it."""
    own = probabilities.double()
    others = (own.sum(dim=1, keepdim=True) - own).clamp_min(1e-12)
    # Rounded, so that probabilities that are equal stay so whatever the order of the sum.
    return torch.where(own <= 0.5, own, 1 - others.log().mul(1e5).round())


def _macro_auroc(values: Tensor, truth: Tensor, draws: Tensor) -> Tensor:
    """One class against the rest, mean over the classes that occur; NaN where there is only one."""
    present = truth.sum(dim=0).nonzero().flatten().tolist()
    if len(present) < 2:
        return torch.full((len(draws),), torch.nan, dtype=draws.dtype)
    if truth.shape[1] == 2:
        present = present[1:]  # the other class is its mirror image
    return torch.stack([_auroc(values[:, c], truth[:, c], draws) for c in present]).mean(dim=0)


def _auroc(values: Tensor, positive: Tensor, draws: Tensor) -> Tensor:
    """The chance that a positive ranks above a negative, equal values counting a half, under every draw [R]."""
    ordered, order = values.sort()
    _, sizes = ordered.unique_consecutive(return_counts=True)
    ends = sizes.cumsum(dim=0) - 1
    weights, truth = draws[:, order], positive[order]
    above = (weights * truth).cumsum(dim=1)[:, ends]
    below = (weights * (1 - truth)).cumsum(dim=1)[:, ends]
    zero = torch.zeros_like(above[:, :1])
    positives, negatives = (torch.diff(each, dim=1, prepend=zero) for each in (above, below))
    won = (positives * (below - negatives / 2)).sum(dim=1)
    return won / (above[:, -1] * below[:, -1])
