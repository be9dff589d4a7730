"""Rank correlations between a batch's score and an expert's error there, with intervals that resample batches."""

from collections.abc import Callable, Sequence

import numpy as np

from mergestream.bench.analysis.resampling import batch_counts, estimate_over_targets
from mergestream.bench.claims.claim_finding import CORRELATION, UNKNOWN, ClaimFinding, missing, verdict_of
from mergestream.bench.claims.correlations import kendall, spearman
from mergestream.bench.claims.evidence import Evidence
from mergestream.functional.intervals import FEW_BATCHES

Coefficient = Callable[..., np.ndarray]
# A point and its resamples [R] for one stream of one target.
Statistic = Callable[[Evidence, np.ndarray], tuple[float, np.ndarray]]
COEFFICIENTS: dict[str, Coefficient] = {"Spearman": spearman, "Kendall": kendall}
TRACKS = "entropy_tracks_error"
RANKS_BETTER = "entropy_ranks_better_than_max_softmax"
TRACKS_CLAIM = "Low entropy goes with low error."
RANKS_BETTER_CLAIM = "Entropy tells the better expert more reliably than the maximum softmax does."
NEEDED = "the experts' own answers with labels: runs of single_expert for every expert (each benchmark makes them)."


def check_scores(evidence: Sequence[Evidence]) -> list[ClaimFinding]:
    """Per stream: entropy against error among experts and over batches, and against the maximum softmax."""
    if not evidence:
        return [
            missing(TRACKS, TRACKS_CLAIM, "entropy and error", CORRELATION, NEEDED),
            missing(RANKS_BETTER, RANKS_BETTER_CLAIM, "entropy less maximum softmax", CORRELATION, NEEDED),
        ]
    findings = []
    for stream in dict.fromkeys(each.stream for each in evidence):
        here = [each for each in evidence if each.stream == stream]
        for kind, coefficient in COEFFICIENTS.items():
            findings += [_among_experts(here, kind, coefficient), _over_batches(here, kind, coefficient)]
        findings.append(_against_max_softmax(here))
    return findings


def _among_experts(here: Sequence[Evidence], kind: str, coefficient: Coefficient) -> ClaimFinding:
    def statistic(each: Evidence, counts: np.ndarray) -> tuple[float, np.ndarray]:
        return _mean_over_batches(coefficient(each.entropy, each.error), counts)

    measure = f"{kind} correlation of entropy and error among the experts, mean over batches"
    return _judge(here, TRACKS, TRACKS_CLAIM, measure, statistic)


def _over_batches(here: Sequence[Evidence], kind: str, coefficient: Coefficient) -> ClaimFinding:
    def statistic(each: Evidence, counts: np.ndarray) -> tuple[float, np.ndarray]:
        columns = list(zip(each.entropy.T, each.error.T, strict=True))
        point = _mean_of_defined(np.array([coefficient(x, y) for x, y in columns]))
        return float(point), _mean_of_defined(np.stack([coefficient(x, y, counts) for x, y in columns]))

    measure = f"{kind} correlation of entropy and error over batches, mean over experts"
    return _judge(here, TRACKS, TRACKS_CLAIM, measure, statistic)


def _against_max_softmax(here: Sequence[Evidence]) -> ClaimFinding:
    def statistic(each: Evidence, counts: np.ndarray) -> tuple[float, np.ndarray]:
        gap = spearman(each.entropy, each.error) - spearman(each.max_softmax, each.error)
        return _mean_over_batches(gap, counts)

    measure = "Spearman correlation with the error among the experts: entropy's less the maximum softmax's"
    return _judge(here, RANKS_BETTER, RANKS_BETTER_CLAIM, measure, statistic)


def _judge(here: Sequence[Evidence], name: str, claim: str, measure: str, statistic: Statistic) -> ClaimFinding:
    """Average over targets; streams on which the statistic is undefined (all experts equal) are left out."""
    stream, random = here[0].stream, np.random.RandomState(0)
    results = [(each.target, *statistic(each, batch_counts(random, len(each.error)))) for each in here]
    defined = [(target, point, drawn) for target, point, drawn in results if np.isfinite(point)]
    if not defined:
        sentence = f"On {stream} no batch decides: all experts have the same error, or the same score."
        return ClaimFinding(name, claim, stream, measure, CORRELATION, None, UNKNOWN, sentence)
    targets, points, draws = zip(*defined, strict=True)
    filled = [np.where(np.isfinite(drawn), drawn, point) for point, drawn in zip(points, draws, strict=True)]
    estimate = estimate_over_targets(points, np.stack(filled), targets)
    few = min(len(each.error) for each in here) < FEW_BATCHES
    above = sum(np.mean([p for p, t in zip(points, targets, strict=True) if t == name]) > 0 for name in set(targets))
    sentence = (
        f"On {stream}: {measure} {estimate.mean:+.2f} [{estimate.low:+.2f}, {estimate.high:+.2f}], "
        f"above 0 at {above} of {len(set(targets))} targets"
    )
    verdict = UNKNOWN if few else verdict_of(estimate)
    sentence += f"; a stream has fewer than {FEW_BATCHES} batches, too few for an interval." if few else "."
    return ClaimFinding(name, claim, stream, measure, CORRELATION, estimate, verdict, sentence)


def _mean_over_batches(values: np.ndarray, counts: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean of values [T] over the batches where they are defined, and under resamples with counts [R,T]."""
    defined = np.isfinite(values)
    if not defined.any():
        return float("nan"), np.full(len(counts), np.nan)
    numbers, times = values[defined], counts[:, defined]
    total = times.sum(axis=1)
    return float(numbers.mean()), np.where(total > 0, times @ numbers / np.maximum(total, 1), np.nan)


def _mean_of_defined(values: np.ndarray) -> np.ndarray:
    """Mean over the first axis of the defined values; NaN if there is none."""
    defined = np.isfinite(values)
    total = np.where(defined, values, 0).sum(axis=0)
    return np.where(defined.any(axis=0), total / np.maximum(defined.sum(axis=0), 1), np.nan)
