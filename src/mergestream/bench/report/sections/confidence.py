"""Whether confidence can be trusted: reliability diagrams and risk-coverage curves."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mergestream.bench.analysis.confidence import Reliability, RiskCoverage
from mergestream.bench.report.method_figures import draw_reliability, draw_risk_coverage
from mergestream.bench.report.method_styles import keys_of
from mergestream.bench.report.page import Picture, Section, paragraph
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.svg import Panel, panel
from mergestream.bench.report.tables import Table

TOLD = (
    "Reliability: below the diagonal a model is surer than it is right. Risk and coverage: the errors that remain when "
    "only the most confident share is answered and the rest goes to a human; lower is better."
)
LEAST = 0.005
COVERAGES = (0.5, 0.8, 0.9, 1.0)


def confidence(report: ReportFindings) -> Section:
    panels = []
    for number, stream in enumerate(report.telling_streams):
        diagrams = [_filled(c) for c in report.reliabilities if c.stream == stream and c.label in report.plain_methods]
        curves = [c for c in report.risk_coverages if c.stream == stream and c.label in report.plain_methods]
        panels += [_reliability(f"reliability{number}", stream, diagrams), _risk(f"risk{number}", stream, curves)]
    caption = (
        "Reliability diagrams (ten bins, all targets together; a bin with less than 0.5 % of the images is left out) "
        "and risk-coverage curves (mean over targets). Variants are in the tables."
    )
    picture = Picture(panels, caption, keys_of(report.plain_methods))
    return Section("Confidence", [paragraph(TOLD), picture, *[_table(report, s) for s in report.telling_streams]])


def _filled(curve: Reliability) -> Reliability:
    """Without bins of a few images, whose accuracy is noise."""
    kept = curve.share >= LEAST
    return replace(curve, confidence=curve.confidence[kept], accuracy=curve.accuracy[kept], share=curve.share[kept])


def _reliability(name: str, stream: str, curves: Sequence[Reliability]) -> Panel:
    gaps = {each.label: float(np.sum(each.share * (each.confidence - each.accuracy))) for each in curves}
    said = "; ".join(f"{label} {100 * gap:+.1f}" for label, gap in gaps.items())
    return panel(
        name,
        f"Accuracy by confidence on {stream}. Mean confidence less accuracy, in points: {said}.",
        lambda ax: draw_reliability(ax, curves),
        title=f"Reliability, {stream}",
        height=3.7,
    )


def _risk(name: str, stream: str, curves: Sequence[RiskCoverage]) -> Panel:
    half = {each.label: 100 * _at(each, 0.5) for each in curves}
    said = "; ".join(f"{label} {risk:.1f}" for label, risk in half.items())
    return panel(
        name,
        f"Errors by share of images answered on {stream}. At half of the images, in %: {said}.",
        lambda ax: draw_risk_coverage(ax, curves),
        title=f"Risk and coverage, {stream}",
        height=3.7,
    )


def _at(curve: RiskCoverage, coverage: float) -> float:
    return float(np.interp(coverage, curve.coverage, curve.risk))


def _table(report: ReportFindings, stream: str) -> Table:
    curves = [each for each in report.risk_coverages if each.stream == stream]
    rows = tuple((each.label, *(f"{100 * _at(each, share):.1f}" for share in COVERAGES)) for each in curves)
    columns = ("method", *(f"{100 * share:.0f} % answered" for share in COVERAGES))
    return Table(f"Errors among the answered, {stream}", columns, rows, note="In %, mean over targets.")
