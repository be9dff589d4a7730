"""One claim of the paper with what was measured, and tables of such findings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.report.result_table import ResultTable

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


NOTE = (
    "In brackets: the 95 % interval of a bootstrap over batches. A claim holds, or does not hold, only if the whole "
    "interval says so. Not corrected for the number of comparisons."
)
MARKS = {HOLDS: "✓", FAILS: "✗", UNKNOWN: "?"}
# Factor, digits and unit of the printed number.
FORMATS = {SHARE: (100, 0, " %"), POINTS: (1, 2, " points")}


def claims_by_stream(findings: Sequence[ClaimFinding], title: str) -> ResultTable:
    """Claims and measures by streams, each cell a number and a mark; claims without data are left out."""
    measured = [each for each in findings if each.stream]
    streams = list(dict.fromkeys(str(each.stream) for each in measured))
    cells = {(each.claim, each.measure, each.stream): _cell(each) for each in measured}
    rows = tuple(
        (claim, measure, *(cells.get((claim, measure, stream), "–") for stream in streams))
        for claim, measure in dict.fromkeys((each.claim, each.measure) for each in measured)
    )
    note = f"✓ holds, ✗ does not hold, ? cannot be told here. {NOTE}"
    return ResultTable(title, ("claim", "measure", *streams), rows, note=note)


def _cell(finding: ClaimFinding) -> str:
    number = "" if finding.estimate is None else f"{format_estimate(finding.estimate, finding.unit)} "
    return f"{number}{MARKS[finding.verdict]}"


def findings_table(findings: Sequence[ClaimFinding], title: str = "What the paper claims") -> ResultTable:
    """One row per finding; a finding without a number says what is missing."""
    rows = []
    for each in findings:
        number = each.sentence if each.estimate is None else format_estimate(each.estimate, each.unit)
        rows.append((each.claim, each.stream or "–", each.measure, number, each.verdict))
    return ResultTable(title, ("claim", "stream", "measure", "estimate", "verdict"), tuple(rows), note=NOTE)


def format_estimate(estimate: Estimate, unit: str) -> str:
    """The number and its interval, with as many digits as its unit needs."""
    factor, digits, name = FORMATS.get(unit, (1, 2, ""))
    scaled = estimate.times(factor)
    return f"{scaled.mean:+.{digits}f} [{scaled.low:.{digits}f}, {scaled.high:.{digits}f}]{name}"
