"""One claim of the paper with what was measured, and tables of such findings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.report.result_table import ResultTable
from mergestream.functional.intervals import FEW_BATCHES, by_target, percentiles, target_mean

RESAMPLES = 1000
Verdict = Literal["holds", "does not hold", "cannot be told here"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
UNKNOWN: Verdict = "cannot be told here"
CORRELATION, POINTS, SHARE, ERROR = "rank correlation", "points", "share", "squared error"
NOTE = (
    "✓ holds, ✗ does not hold, ? cannot be told here. In brackets: the 95 % interval of a bootstrap at these targets, "
    "over batches, and for differences in accuracy over training and stream seeds as well. A claim holds, "
    "or does not hold, only if the whole interval says so. Not corrected for the number of comparisons."
)
MARKS = {HOLDS: "✓", FAILS: "✗", UNKNOWN: "?"}
# Factor, digits and unit of the printed number.
FORMATS = {SHARE: (100, 0, " %"), POINTS: (1, 2, " points"), ERROR: (1, 3, "")}


@dataclass(frozen=True)
class ClaimFinding:
    """One claim on one stream: an estimate of `measure` in `unit`, or the reason why there is none."""

    claim: str
    stream: str | None
    measure: str = ""
    unit: str = ""
    estimate: Estimate | None = None
    verdict: Verdict = UNKNOWN
    reason: str = ""


def verdict_of(estimate: Estimate, at_least: float = 0.0) -> Verdict:
    """Verdict on the claim that a quantity exceeds a bound: only the whole interval decides."""
    if estimate.low > at_least:
        return HOLDS
    return FAILS if estimate.high < at_least else UNKNOWN


def estimate_over_targets(points: np.ndarray, draws: np.ndarray, targets: Sequence[str]) -> Estimate:
    """Mean over targets of values [R], with the interval of their resamples [R,RESAMPLES], runs of a target tied."""
    return Estimate(target_mean(points, targets), *percentiles(by_target(draws, targets).mean(axis=0)))


def finding_over_targets(
    claim: str,
    stream: str,
    measure: str,
    unit: str,
    drawn: Sequence[tuple[str, float, np.ndarray]],
    *,
    fewest_batches: int,
    undefined: str,
) -> ClaimFinding:
    """Average a statistic over targets, from each target, its value and resamples; undefined values are left out.

    `undefined` is the reason where no target defines it. Few batches allow no verdict.
    """
    defined = [each for each in drawn if np.isfinite(each[1])]
    if not defined:
        return ClaimFinding(claim, stream, reason=undefined)
    targets, points, draws = zip(*defined, strict=True)
    filled = [np.where(np.isfinite(each), each, point) for point, each in zip(points, draws, strict=True)]
    estimate = estimate_over_targets(np.array(points), np.stack(filled), targets)
    verdict = UNKNOWN if fewest_batches < FEW_BATCHES else verdict_of(estimate)
    return ClaimFinding(claim, stream, measure, unit, estimate, verdict)


def missing(claim: str, needed: str) -> ClaimFinding:
    """A claim without data, and the data it needs."""
    return ClaimFinding(claim, None, reason=f"Missing: {needed}")


def claims_by_stream(findings: Sequence[ClaimFinding]) -> ResultTable:
    """Claims and measures by streams, each cell a number and a mark; claims without data are left out."""
    measured = [each for each in findings if each.estimate]
    streams = list(dict.fromkeys(str(each.stream) for each in measured))
    cells = {
        (each.claim, each.measure, each.stream): f"{format_estimate(each.estimate, each.unit)} {MARKS[each.verdict]}"
        for each in measured
        if each.estimate
    }
    rows = tuple(
        (claim, measure, *(cells.get((claim, measure, stream), "–") for stream in streams))
        for claim, measure in dict.fromkeys((each.claim, each.measure) for each in measured)
    )
    return ResultTable("Claims by stream", ("claim", "measure", *streams), rows, note=NOTE)


def format_estimate(estimate: Estimate, unit: str) -> str:
    """The number and its interval, with as many digits as its unit needs."""
    factor, digits, name = FORMATS.get(unit, (1, 2, ""))
    scaled = estimate.times(factor)
    return f"{scaled.mean:+.{digits}f} [{scaled.low:.{digits}f}, {scaled.high:.{digits}f}]{name}"
