"""The paper's claims beside what these runs show."""

from collections.abc import Sequence

from mergestream.bench.claims.claim_figures import STYLES, draw_findings
from mergestream.bench.claims.claim_finding import CORRELATION, POINTS, ClaimFinding, claims_by_stream, findings_table
from mergestream.bench.report.page import Bullets, LegendKey, PageFigure, PageFold, PageSection, Part
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.svg import Panel, css_colour, panel


def claims_section(report: ReportFindings) -> PageSection | None:
    measured = [each for each in report.claims if each.estimate is not None]
    missing = [f"{each.claim} {each.sentence}" for each in report.claims if each.estimate is None]
    if not measured:
        return None
    parts: list[Part] = [claims_by_stream(measured, "Claims by stream"), _figure(measured)]
    parts += [Bullets(list(dict.fromkeys(missing)))] if missing else []
    every = PageFold("Every claim on every stream", [findings_table(report.claims)])
    return PageSection("The paper's claims", [*parts, every])


def _figure(findings: Sequence[ClaimFinding]) -> PageFigure:
    panels: list[Panel] = []
    for unit in (CORRELATION, POINTS):
        here = [each for each in findings if each.unit == unit]
        panels += [_panel(f"claims-{len(panels)}", unit, here)] if here else []
    keys = [LegendKey(verdict, css_colour(colour)) for verdict, (colour, _) in STYLES.items()]
    caption = "Each claim's number on each stream with its 95 % interval; right of 0 supports the claim."
    return PageFigure(panels, caption, keys)


def _panel(name: str, unit: str, findings: Sequence[ClaimFinding]) -> Panel:
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in STYLES}
    verdicts = ", ".join(f"{verdict} {count} times" for verdict, count in counts.items())
    rows = len(findings) + len({each.measure for each in findings})
    return panel(
        name,
        f"{len(findings)} findings in {unit}, each a mark with its interval: the claim {verdicts}.",
        lambda ax: draw_findings(ax, findings),
        width=8.4,
        height=0.2 * rows + 0.9,
        title=f"Claims, in {unit}",
    )
