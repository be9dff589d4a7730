"""The benchmark's tables with intervals, and the accuracies as a figure."""

from collections.abc import Sequence

from mergestream.bench.analysis.comparison import ResultRow
from mergestream.bench.report.bench_tables import all_tables
from mergestream.bench.report.method_figures import draw_intervals
from mergestream.bench.report.page import PageFigure, PageFold, PageSection
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.svg import Panel, panel


def results_section(report: ReportFindings) -> PageSection:
    tables = all_tables(report.bench)
    by_stream = {stream: [t for t in tables if t.title.endswith(f", {stream}")] for stream in report.streams}
    accuracy, *others = [table for table in tables if not any(table in group for group in by_stream.values())]
    folds = [PageFold(f"By target, class and metric: {stream}", group) for stream, group in by_stream.items()]
    return PageSection("Results", [accuracy, _figure(report), *others, *folds])


def _figure(report: ReportFindings) -> PageFigure:
    panels = []
    for number, stream in enumerate(report.figure_streams):
        rows = sorted((r for r in report.bench.rows if r.stream == stream), key=lambda row: -row.accuracy.mean)
        panels.append(_panel(f"accuracy{number}", stream, rows))
    caption = (
        f"Accuracy, mean over targets, with 95 % intervals, on {' and '.join(report.figure_streams)}; a method and its "
        f"variants share one colour."
    )
    return PageFigure(panels, caption)


def _panel(name: str, stream: str, rows: Sequence[ResultRow]) -> Panel:
    first, last = rows[0], rows[-1]
    alternative = (
        f"Accuracy of {len(rows)} methods on {stream}, each a dot with its interval, from {first.label} "
        f"({100 * first.accuracy.mean:.1f} %) at the top to {last.label} ({100 * last.accuracy.mean:.1f} %) below."
    )
    height = 0.22 * len(rows) + 0.9
    return panel(name, alternative, lambda ax: draw_intervals(ax, rows, "accuracy"), height=height, title=stream)
