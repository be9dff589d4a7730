"""Whether confidence can be trusted: reliability diagrams and risk-coverage curves."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mergestream.bench.analysis.confidence import Reliability, RiskCoverage
from mergestream.bench.report.method_figures import draw_reliability, draw_risk_coverage
from mergestream.bench.report.method_styles import keys_of
from mergestream.bench.report.page import PageFigure, PageSection, Paragraph
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable
from mergestream.bench.report.svg import Panel, panel

INTRO = (
    "Reliability: below the diagonal a model is more confident than it is accurate. Risk and coverage: the errors that "
    "remain when only the most confident share is answered and the rest goes to a human; lower is better."
)
CAPTION = (
    "Reliability diagrams (ten bins, all targets together; a bin with less than 0.5 % of the images is left out) "
    "and risk-coverage curves (mean over targets). Variants are in the tables."
)
SMALLEST_BIN = 0.005  # share of the images; with fewer the accuracy is noise
COVERAGES = (0.5, 0.8, 0.9, 1.0)


def confidence_section(report: ReportFindings) -> PageSection:
    panels = []
    for number, stream in enumerate(report.figure_streams):
        diagrams = [
            _without_small_bins(each)
            for each in report.reliabilities
            if each.stream == stream and each.label in report.plain_methods
        ]
        curves = [c for c in report.risk_coverages if c.stream == stream and c.label in report.plain_methods]
        panels += [_reliability(f"reliability{number}", stream, diagrams), _risk(f"risk{number}", stream, curves)]
    figure = PageFigure(panels, CAPTION, keys_of(report.plain_methods))
    tables = [_table(report, stream) for stream in report.figure_streams]
    return PageSection("Confidence", [Paragraph(INTRO), figure, *tables])


def _without_small_bins(curve: Reliability) -> Reliability:
    large = curve.share >= SMALLEST_BIN
    return replace(curve, confidence=curve.confidence[large], accuracy=curve.accuracy[large], share=curve.share[large])


def _reliability(name: str, stream: str, curves: Sequence[Reliability]) -> Panel:
    gaps = {each.label: float(np.sum(each.share * (each.confidence - each.accuracy))) for each in curves}
    listed = "; ".join(f"{label} {100 * gap:+.1f}" for label, gap in gaps.items())
    return panel(
        name,
        f"Accuracy by confidence on {stream}. Mean confidence minus accuracy, in points: {listed}.",
        lambda ax: draw_reliability(ax, curves),
        title=f"Reliability, {stream}",
        height=3.7,
    )


def _risk(name: str, stream: str, curves: Sequence[RiskCoverage]) -> Panel:
    listed = "; ".join(f"{each.label} {100 * _risk_at(each, 0.5):.1f}" for each in curves)
    return panel(
        name,
        f"Errors by share of images answered on {stream}. At half of the images, in %: {listed}.",
        lambda ax: draw_risk_coverage(ax, curves),
        title=f"Risk and coverage, {stream}",
        height=3.7,
    )


def _risk_at(curve: RiskCoverage, coverage: float) -> float:
    return float(np.interp(coverage, curve.coverage, curve.risk))


def _table(report: ReportFindings, stream: str) -> ResultTable:
    curves = [each for each in report.risk_coverages if each.stream == stream]
    rows = tuple((each.label, *(f"{100 * _risk_at(each, share):.1f}" for share in COVERAGES)) for each in curves)
    columns = ("method", *(f"{100 * share:.0f} % answered" for share in COVERAGES))
    return ResultTable(f"Errors among the answered, {stream}", columns, rows, note="In %, mean over targets.")
