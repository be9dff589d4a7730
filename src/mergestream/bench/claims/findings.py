"""A claim of the paper beside what was measured here: holds, does not hold, or cannot be told."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mergestream.bench.analysis.comparison import Estimate

Verdict = Literal["holds", "does not hold", "cannot be told here"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
UNKNOWN: Verdict = "cannot be told here"
CORRELATION, POINTS, SHARE, VARIANCE, DEGREES = "rank correlation", "points", "share", "variance", "degrees"


@dataclass(frozen=True)
class Finding:
    """One claim on one stream (None: it is not about streams). `measure` says what the estimate is of, in `unit`."""

    name: str
    claim: str
    stream: str | None
    measure: str
    unit: str
    estimate: Estimate | None
    verdict: Verdict
    sentence: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judged(estimate: Estimate, at_least: float = 0.0) -> Verdict:
    """A claim that the quantity exceeds a bound: the whole interval decides, or nothing does."""
    if estimate.low > at_least:
        return HOLDS
    return FAILS if estimate.high < at_least else UNKNOWN


def missing(name: str, claim: str, measure: str, unit: str, what: str) -> Finding:
    """A claim that nothing given can speak to, and what would."""
    return Finding(name, claim, None, measure, unit, None, UNKNOWN, f"Missing: {what}")
