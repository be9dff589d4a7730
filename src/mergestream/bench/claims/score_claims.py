"""Claims about scores: rank correlations between an expert's score on a batch and its error there."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from mergestream.bench.analysis.comparison import pairing_of
from mergestream.bench.claims.claim_finding import (
    CORRELATION,
    RESAMPLES,
    UNKNOWN,
    ClaimFinding,
    estimate_over_targets,
    missing,
    verdict_of,
)
from mergestream.bench.records import Run
from mergestream.functional import scores as scoring
from mergestream.functional.intervals import FEW_BATCHES

Coefficient = Callable[..., np.ndarray]
Drawn = tuple[float, np.ndarray]  # a statistic, and its resamples [R]
TRACKS = "Low entropy goes with low error."
RANKS_BETTER = "Entropy tells the better expert more reliably than the maximum softmax does."
NEEDED = "the experts' own answers with labels: runs of single_expert for every expert (each benchmark makes them)."


def spearman(x: np.ndarray, y: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Spearman's rho of x and y [...,N] over the last axis; NaN where either is constant.

    `counts` [...,N] says how often each point was drawn, so that a bootstrap need not build its resamples.
    """
    times = np.ones(x.shape) if counts is None else counts
    a, b = (_centred_ranks(values, times) for values in (x, y))
    return _ratio((times * a * b).sum(axis=-1), (times * a * a).sum(axis=-1), (times * b * b).sum(axis=-1))


def kendall(x: np.ndarray, y: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Kendall's tau-b of x and y [...,N] over the last axis, with `counts` as in `spearman`."""
    times = np.ones(x.shape) if counts is None else counts
    a, b = (np.sign(values[..., :, None] - values[..., None, :]) for values in (x, y))

    def pairs(signs: np.ndarray) -> np.ndarray:
        return (times * _apply(signs, times)).sum(axis=-1)

    return _ratio(pairs(a * b), pairs(a * a), pairs(b * b))


def _centred_ranks(values: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Mid-ranks less their mean, which is exactly 0 for constant values."""
    signs = np.sign(values[..., :, None] - values[..., None, :])
    return _apply(signs, times) / 2


def _apply(matrix: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """matrix [...,N,N] times vectors [...,N]; one matrix serves all vectors in a single product."""
    return vectors @ matrix.T if matrix.ndim == 2 else (matrix @ vectors[..., None])[..., 0]


def _ratio(joint: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    product = first * second
    defined = product > 0
    return np.where(defined, joint / np.sqrt(np.where(defined, product, 1)), np.nan)


@dataclass(frozen=True)
class Evidence:
    """Scores and errors of K experts on T batches of one stream [T,K]; a lower score means more confident."""

    target: str
    stream: str
    experts: tuple[str, ...]
    entropy: np.ndarray  # nats
    max_softmax: np.ndarray  # 1 minus the mean of the maximum softmax
    error: np.ndarray  # 0 to 1


def evidence_of_runs(runs: Sequence[Run]) -> list[Evidence]:
    """Evidence from the labelled runs of every expert alone: one per target, seed, pool and stream."""
    groups: dict[tuple[Any, ...], dict[str, Run]] = defaultdict(dict)
    for run in runs:
        if run.is_single:
            key = *pairing_of(run), run.stream, run.arguments["stream"]["hash"]
            groups[key][run.arguments["options"]["expert"]] = run
    return [_of_group(group) for group in groups.values() if len(group) > 1]


def _of_group(group: dict[str, Run]) -> Evidence:
    first = next(iter(group.values()))
    experts = tuple(name for name in first.arguments["pool"]["experts"] if name in group)
    # Softmax undoes the logarithm; a probability that fp16 rounded to 0 stays 0.
    logits = torch.stack([group[name].probabilities.log() for name in experts])  # [K,N,C]
    wrong = (logits.argmax(dim=-1) != first.labels).float()
    sizes = [len(batch) for batch in first.batches]
    scores = [[score(part) for part in logits.split(sizes, dim=1)] for score in (scoring.entropy, scoring.max_softmax)]
    errors = [part.mean(dim=1) for part in wrong.split(sizes, dim=1)]
    columns = [torch.stack(parts).numpy().astype(float) for parts in (*scores, errors)]
    return Evidence(first.target, first.stream, experts, *columns)


def _mean(values: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Mean over the first axis of the defined values [N,...], each counted [N,...] times; NaN if there is none."""
    return np.ma.filled(np.ma.average(np.ma.masked_invalid(values), axis=0, weights=counts), np.nan)


def _over_resamples(values: np.ndarray, counts: np.ndarray) -> Drawn:
    """The mean of values [T] over the batches where they are defined, and under resamples with counts [R,T]."""
    return float(_mean(values)), _mean(np.broadcast_to(values[:, None], counts.T.shape), counts.T)


def _among_experts(coefficient: Coefficient, each: Evidence, counts: np.ndarray) -> Drawn:
    return _over_resamples(coefficient(each.entropy, each.error), counts)


def _over_batches(coefficient: Coefficient, each: Evidence, counts: np.ndarray) -> Drawn:
    columns = list(zip(each.entropy.T, each.error.T, strict=True))
    point = _mean(np.array([coefficient(x, y) for x, y in columns]))
    return float(point), _mean(np.stack([coefficient(x, y, counts) for x, y in columns]))


def _entropy_less_max_softmax(each: Evidence, counts: np.ndarray) -> Drawn:
    return _over_resamples(spearman(each.entropy, each.error) - spearman(each.max_softmax, each.error), counts)


# A claim, what is measured for it, and the function that measures it on one stream of one target.
STATISTICS: tuple[tuple[str, str, Callable[[Evidence, np.ndarray], Drawn]], ...] = (
    *(
        (TRACKS, f"{kind} correlation of entropy and error {where}", partial(function, coefficient))
        for kind, coefficient in {"Spearman": spearman, "Kendall": kendall}.items()
        for where, function in {
            "among the experts, mean over batches": _among_experts,
            "over batches, mean over experts": _over_batches,
        }.items()
    ),
    (
        RANKS_BETTER,
        "Spearman correlation with the error among the experts: entropy's less the maximum softmax's",
        _entropy_less_max_softmax,
    ),
)


def check_scores(evidence: Sequence[Evidence]) -> list[ClaimFinding]:
    """Per stream: entropy against error among experts and over batches, and against the maximum softmax."""
    if not evidence:
        return [missing(TRACKS, NEEDED), missing(RANKS_BETTER, NEEDED)]
    streams = {each.stream: [other for other in evidence if other.stream == each.stream] for each in evidence}
    return [_finding(here, *statistic) for here in streams.values() for statistic in STATISTICS]


def _finding(
    here: Sequence[Evidence], claim: str, measure: str, statistic: Callable[[Evidence, np.ndarray], Drawn]
) -> ClaimFinding:
    """Average over targets; streams on which the statistic is undefined (all experts equal) are left out."""
    stream, random = here[0].stream, np.random.RandomState(0)
    results = []
    for each in here:
        batches = len(each.error)
        counts = random.multinomial(batches, np.full(batches, 1 / batches), size=RESAMPLES)
        results.append((each.target, *statistic(each, counts)))
    defined = [result for result in results if np.isfinite(result[1])]
    if not defined:
        reason = f"On {stream} no batch decides: all experts have the same error, or the same score."
        return ClaimFinding(claim, stream, reason=reason)
    targets, points, draws = zip(*defined, strict=True)
    filled = [np.where(np.isfinite(drawn), drawn, point) for point, drawn in zip(points, draws, strict=True)]
    estimate = estimate_over_targets(np.array(points), np.stack(filled), targets)
    few = min(len(each.error) for each in here) < FEW_BATCHES
    return ClaimFinding(claim, stream, measure, CORRELATION, estimate, UNKNOWN if few else verdict_of(estimate))
