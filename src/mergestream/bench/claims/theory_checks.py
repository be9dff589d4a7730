"""The paper's theory, checked on the experts' own answers and their mean's: decomposition, logits, priors, drift."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mergestream.bench.analysis.comparison import Estimate, grouped
from mergestream.bench.claims.claim_finding import (
    CORRELATION,
    ERROR,
    RESAMPLES,
    SHARE,
    ClaimFinding,
    finding_over_targets,
    missing,
    verdict_of,
)
from mergestream.bench.records import Run
from mergestream.functional.intervals import percentiles
from mergestream.functional.rank_correlation import spearman

DIVERSE = "Experts of different sites make different errors, so that averaging helps."
LOCAL = "Averaging weights costs accuracy that averaging answers does not."
WEAKER = "The mean's logits are weaker than its experts'."
PRIORS = "An expert is surer of the classes that it saw more often."
DRIFT = "Where experts drifted further apart, their mean fails more."
LEAST = 1e-6  # probabilities are stored in half precision: smaller ones are not told apart
FEW_POINTS = 8


@dataclass(frozen=True)
class TargetAnswers:
    """Answers at one target in one order of arrival, from S training seeds of K experts."""

    target: str
    experts: tuple[str, ...]
    alone: np.ndarray  # [S,K,N,C] probabilities of every expert
    merged: np.ndarray  # [S,N,C] of the mean of their weights
    labels: np.ndarray  # [N]
    sizes: tuple[int, ...]  # of the batches

    @property
    def truth(self) -> np.ndarray:
        """One-hot labels [N,C]."""
        return np.eye(self.alone.shape[-1])[self.labels]


@dataclass(frozen=True)
class ErrorParts:
    """Squared error of probabilities, mean over targets: averaged = bias + variance / K + (1 - 1/K) covariance."""

    experts: int
    seeds: int
    bias: float
    variance: float
    covariance: float
    averaged: float  # of the mean of answers
    merged: float  # of the mean of weights


@dataclass(frozen=True)
class DriftPoint:
    """One target: how far apart the others' experts are, and how much worse their mean is than they are alone."""

    dataset: str
    network: str
    target: str
    seed: int
    angle: float  # degrees, mean over encoder blocks and pairs
    failure: float  # accuracy of the experts on average less that of their mean, 0 to 1


def answers_of(runs: Sequence[Run]) -> list[TargetAnswers]:
    """Group the runs of single experts and of the mean on i.i.d. streams by target; of the stream seeds the first."""
    here = [run for run in runs if run.stream == "iid" and (run.is_single or run.label == "mean")]
    answers = []
    for target, own in grouped(here, "target").items():
        first = min(run.stream_seed for run in own)
        pools = grouped((run for run in own if run.stream_seed == first), "training_seed")
        experts = tuple(own[0].arguments["pool"]["experts"])
        alone, merged = [], []
        for each in pools.values():
            by_expert = {run.arguments["options"]["expert"]: run for run in each if run.is_single}
            alone.append([by_expert[name].probabilities.numpy() for name in experts])
            merged.append(next(run.probabilities.numpy() for run in each if run.label == "mean"))
        labels, sizes = own[0].labels.numpy(), tuple(len(batch) for batch in own[0].batches)
        answers.append(TargetAnswers(target, experts, np.array(alone), np.array(merged), labels, sizes))
    return answers


def error_parts(answers: Sequence[TargetAnswers]) -> ErrorParts:
    """The decomposition of the averaged answers' squared error over training seeds, mean over targets."""
    means = np.mean([_error_terms(each).mean(axis=0) for each in answers], axis=0)
    seeds, experts = answers[0].alone.shape[:2]
    return ErrorParts(experts, seeds, *map(float, means))


def _error_terms(each: TargetAnswers) -> np.ndarray:
    """Bias, variance, covariance, error of averaged answers and of averaged weights, for every image [N,5]."""
    over_seeds = each.alone.mean(axis=0)  # [K,N,C]
    experts = each.alone.shape[1]
    bias = _square(over_seeds.mean(axis=0) - each.truth)
    deviations = each.alone - over_seeds
    variance = _square(deviations).mean(axis=(0, 1))
    together = _square(deviations.sum(axis=1)).mean(axis=0)  # all pairs, an expert with itself included
    covariance = (together - experts * variance) / (experts * (experts - 1)) if experts > 1 else np.zeros_like(bias)
    averaged = _square(each.alone.mean(axis=1) - each.truth).mean(axis=0)
    merged = _square(each.merged - each.truth).mean(axis=0)
    return np.stack([bias, variance, covariance, averaged, merged], axis=-1)


def _square(values: np.ndarray) -> np.ndarray:
    return np.square(values).sum(axis=-1)


def check_theory(
    answers: Sequence[TargetAnswers], class_counts: Mapping[str, Sequence[int]], where: str
) -> list[ClaimFinding]:
    """Four claims on one data set; `class_counts`: training images by class [C] of every expert."""
    parts = [_drawn(_error_terms(each), each.sizes) for each in answers]
    spreads = [_drawn(_logit_spreads(each), each.sizes) for each in answers]
    targets = [each.target for each in answers]
    fewest = min(len(each.sizes) for each in answers)
    undefined = "All shares or all answers are equal."

    def finding(claim: str, measure: str, unit: str, drawn: list[tuple[float, np.ndarray]]) -> ClaimFinding:
        by_target = [(target, *each) for target, each in zip(targets, drawn, strict=True)]
        return finding_over_targets(claim, where, measure, unit, by_target, fewest_batches=fewest, undefined=undefined)

    gaps = [(point[1] - point[2], draws[:, 1] - draws[:, 2]) for point, draws in parts]
    costs = [(point[4] - point[3], draws[:, 4] - draws[:, 3]) for point, draws in parts]
    losses = [(1 - point[1] / point[0], 1 - draws[:, 1] / draws[:, 0]) for point, draws in spreads]
    measure = "variance of an expert's answers over training seeds less the covariance of two experts'"
    several = answers[0].alone.shape[0] > 1
    lacking = ClaimFinding(DIVERSE, where, reason="Missing: pools of two training seeds or more (--seeds 0,1,2).")
    return [
        finding(DIVERSE, measure, ERROR, gaps) if several else lacking,
        finding(LOCAL, "error of the mean of weights less that of the mean of answers", ERROR, costs),
        finding(WEAKER, "share of the experts' spread of logits that the mean lacks", SHARE, losses),
        finding(
            PRIORS,
            "rank correlation of a class's share in training with certainty (less entropy) on its images",
            CORRELATION,
            [_priors(each, class_counts) for each in answers],
        ),
    ]


def _logit_spreads(each: TargetAnswers) -> np.ndarray:
    """Standard deviation of the logits over classes: of the experts on average and of the mean [N,2]."""
    spreads = [np.log(np.maximum(p, LEAST)).std(axis=-1) for p in (each.alone, each.merged)]
    return np.stack([spreads[0].mean(axis=(0, 1)), spreads[1].mean(axis=0)], axis=-1)


def _priors(each: TargetAnswers, class_counts: Mapping[str, Sequence[int]]) -> tuple[float, np.ndarray]:
    """Mean over experts and seeds; of the classes that the target has."""
    entropies = -(each.alone * np.log(np.maximum(each.alone, LEAST))).sum(axis=-1)  # [S,K,N]
    present = np.unique(each.labels)
    belongs = each.labels[:, None] == present  # [N,C']
    counts = np.add.reduceat(belongs.astype(float), _starts(each.sizes), axis=0)  # [T,C']
    weights = _weights(len(each.sizes))
    points, draws = [], []
    for seed, expert in np.ndindex(*entropies.shape[:2]):
        shares = np.array(class_counts[each.experts[expert]], dtype=float)[present]
        sums = np.add.reduceat(belongs * entropies[seed, expert][:, None], _starts(each.sizes), axis=0)
        mean = sums.sum(axis=0) / counts.sum(axis=0)
        drawn = np.divide(
            weights @ sums, weights @ counts, out=np.tile(mean, (len(weights), 1)), where=weights @ counts > 0
        )
        points.append(-float(spearman(shares, mean)))
        draws.append(-spearman(np.broadcast_to(shares, drawn.shape), drawn))
    # An expert with as many images of every class has no say.
    finite = [place for place, point in enumerate(points) if np.isfinite(point)]
    if not finite:
        return float("nan"), draws[0]
    return float(np.mean([points[place] for place in finite])), np.mean([draws[place] for place in finite], axis=0)


def _drawn(values: np.ndarray, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Means of values [N,q] over images, and under resamples of whole batches [R,q]."""
    sums, weights = np.add.reduceat(values, _starts(sizes), axis=0), _weights(len(sizes))
    return values.mean(axis=0), (weights @ sums) / (weights @ np.array(sizes, dtype=float))[:, None]


def _starts(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *sizes[:-1]])


def _weights(batches: int) -> np.ndarray:
    """How often every batch is drawn in every resample [R,T]."""
    return np.random.RandomState(0).multinomial(batches, np.full(batches, 1 / batches), size=RESAMPLES).astype(float)


def check_drift(points: Sequence[DriftPoint]) -> ClaimFinding:
    """Rank correlation of drift and failure over all targets; resamples are of targets."""
    if len(points) < FEW_POINTS:
        return missing(DRIFT, f"{FEW_POINTS} targets or more; there are {len(points)}.")
    angles, failures = (np.array([getattr(each, name) for each in points]) for name in ("angle", "failure"))
    point = float(spearman(angles, failures))
    draws = spearman(np.tile(angles, (RESAMPLES, 1)), np.tile(failures, (RESAMPLES, 1)), _weights(len(points)))
    measure = f"rank correlation of the encoder blocks' angle with the mean's loss of accuracy, {len(points)} targets"
    if not np.isfinite(point):
        return ClaimFinding(DRIFT, "all", reason="All angles or all losses are equal.")
    estimate = Estimate(point, *percentiles(np.where(np.isfinite(draws), draws, point)))
    return ClaimFinding(DRIFT, "all", measure, CORRELATION, estimate, verdict_of(estimate))
