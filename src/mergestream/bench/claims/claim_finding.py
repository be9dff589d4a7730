"""One claim of the paper with what was measured: it holds, does not hold, or cannot be told."""

from dataclasses import dataclass
from typing import Literal

from mergestream.bench.analysis.comparison import Estimate

Verdict = Literal["holds", "does not hold", "cannot be told here"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
UNKNOWN: Verdict = "cannot be told here"
CORRELATION, POINTS, SHARE = "rank correlation", "points", "share"


@dataclass(frozen=True)
class ClaimFinding:
    """One claim on one stream (None: not about streams). `measure` names what the estimate measures, in `unit`."""

    name: str
    claim: str
    stream: str | None
    measure: str
    unit: str
    estimate: Estimate | None
    verdict: Verdict
    sentence: str


def verdict_of(estimate: Estimate, at_least: float = 0.0) -> Verdict:
    """Verdict on the claim that a quantity exceeds a bound: only the whole interval decides."""
    if estimate.low > at_least:
        return HOLDS
    return FAILS if estimate.high < at_least else UNKNOWN


def missing(name: str, claim: str, measure: str, unit: str, what: str) -> ClaimFinding:
    """A claim without data, and what data it needs."""
    return ClaimFinding(name, claim, None, measure, unit, None, UNKNOWN, f"Missing: {what}")
