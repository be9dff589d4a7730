"""What the paper claims without showing, beside what these runs show."""

from collections.abc import Sequence

from mergestream.bench.claims.claim_figures import STYLES, draw_findings
from mergestream.bench.claims.claim_tables import NOTE, findings_table, printed
from mergestream.bench.claims.findings import CORRELATION, FAILS, HOLDS, POINTS, UNKNOWN, Finding
from mergestream.bench.report.page import Fold, Key, Part, Picture, Section, bullets
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.svg import Panel, css_colour, panel
from mergestream.bench.report.tables import Table

SHORT = {HOLDS: "holds", FAILS: "fails", UNKNOWN: "open"}


def claims(report: ReportFindings) -> Section | None:
    found = [each for each in report.claims if each.estimate is not None]
    missing = [f"{each.claim} {each.sentence}" for each in report.claims if each.estimate is None]
    if not found:
        return None
    parts: list[Part] = [_table(found), _picture(found)]
    parts += [bullets(list(dict.fromkeys(missing)))] if missing else []
    return Section("The paper's claims", [*parts, Fold("Every claim on every stream", [findings_table(report.claims)])])


def _table(found: Sequence[Finding]) -> Table:
    """Claims by streams."""
    streams = list(dict.fromkeys(each.stream for each in found))
    known = {(each.claim, each.measure, each.stream): each for each in found}
    asked = list(dict.fromkeys((each.claim, each.measure) for each in found))
    rows = tuple(
        (claim, measure, *(_cell(known.get((claim, measure, s))) for s in streams)) for claim, measure in asked
    )
    best = {
        (r, c)
        for r, key in enumerate(asked)
        for c, stream in enumerate(streams, start=2)
        if (*key, stream) in known and known[*key, stream].verdict == HOLDS
    }
    columns = ("claim", "measured by", *(stream or "all" for stream in streams))
    return Table("Claims by stream", columns, rows, frozenset(best), f"Open: the interval does not decide. {NOTE}")


def _cell(finding: Finding | None) -> str:
    if finding is None or finding.estimate is None:
        return "–"
    return f"{printed(finding.estimate, finding.unit)}, {SHORT[finding.verdict]}"


def _picture(found: Sequence[Finding]) -> Picture:
    panels: list[Panel] = []
    for unit in (CORRELATION, POINTS):
        here = [each for each in found if each.unit == unit]
        panels += [_panel(f"claims-{len(panels)}", unit, here)] if here else []
    keys = [Key(verdict, css_colour(colour)) for verdict, (colour, _) in STYLES.items()]
    return Picture(panels, "Each claim's number on each stream with its 95 % interval; right of 0 speaks for it.", keys)


def _panel(name: str, unit: str, found: Sequence[Finding]) -> Panel:
    counts = {verdict: sum(each.verdict == verdict for each in found) for verdict in STYLES}
    told = ", ".join(f"{verdict} {count} times" for verdict, count in counts.items())
    rows = len(found) + len({each.measure for each in found})
    return panel(
        name,
        f"{len(found)} findings in {unit}, each a mark with its interval: the claim {told}.",
        lambda ax: draw_findings(ax, found),
        width=8.4,
        height=0.2 * rows + 0.9,
        title=f"Claims, in {unit}",
    )
