"""The paper's claims as a table: what was measured, and win, lose or not to be told."""

from collections.abc import Sequence

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.claims.findings import (
    DEGREES,
    FAILS,
    HOLDS,
    POINTS,
    SHARE,
    UNKNOWN,
    VARIANCE,
    Finding,
    Verdict,
)
from mergestream.bench.report.tables import Table

NOTE = (
    "In brackets: the 95 % interval of a bootstrap over batches (variance: over images; degrees: the range over pairs "
    "of experts). A claim holds, or does not, where the whole interval says so. Nothing is corrected for the number of "
    "comparisons."
)

UNITS = {POINTS: "points", DEGREES: "°"}  # what is printed behind a number
MARKS: dict[Verdict, str] = {HOLDS: "✓", FAILS: "✗", UNKNOWN: "?"}


def claims_by_stream(findings: Sequence[Finding], title: str = "What the paper claims, stream by stream") -> Table:
    """Claims and measures by streams, with a mark for the verdict; findings that are of no stream are left out."""
    shown = [each for each in findings if each.stream is not None]
    streams = list(dict.fromkeys(each.stream for each in shown if each.stream))
    found = {(each.claim, each.measure, each.stream): each for each in shown}
    rows = [
        (claim, measure, *(_cell(found.get((claim, measure, stream))) for stream in streams))
        for claim, measure in dict.fromkeys((each.claim, each.measure) for each in shown)
    ]
    note = f"✓ holds, ✗ does not hold, ? cannot be told here. {NOTE}"
    return Table(title, ("claim", "measure", *streams), tuple(rows), note=note)


def _cell(finding: Finding | None) -> str:
    if finding is None:
        return "–"
    number = "" if finding.estimate is None else f"{printed(finding.estimate, finding.unit)} "
    return f"{number}{MARKS[finding.verdict]}"


def findings_table(findings: Sequence[Finding], title: str = "What the paper claims") -> Table:
    """One row per finding; those without a number say what is missing."""
    rows = []
    for each in findings:
        number = each.sentence if each.estimate is None else printed(each.estimate, each.unit)
        rows.append((each.claim, each.stream or "–", each.measure, number, each.verdict))
    return Table(title, ("claim", "stream", "measure", "estimate", "verdict"), tuple(rows), note=NOTE)


def printed(estimate: Estimate, unit: str) -> str:
    """The number and its interval with as many digits as its unit deserves."""
    scale, digits, name = {SHARE: (100, 0, "%"), VARIANCE: (1, 4, "")}.get(unit, (1, 2, UNITS.get(unit, "")))
    mean, low, high = (scale * value for value in (estimate.mean, estimate.low, estimate.high))
    return f"{mean:+.{digits}f} [{low:.{digits}f}, {high:.{digits}f}] {name}".strip()
