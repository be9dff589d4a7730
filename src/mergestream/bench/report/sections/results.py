"""Tables with intervals, and the same as a picture."""

from collections.abc import Sequence

from mergestream.bench.analysis.comparison import Row
from mergestream.bench.report.bench_report import all_tables
from mergestream.bench.report.method_figures import draw_intervals
from mergestream.bench.report.page import Fold, Part, Picture, Section
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.svg import Panel, panel


def results(report: ReportFindings) -> Section:
    tables = all_tables(report.bench)
    of_stream = {stream: [t for t in tables if t.title.endswith(f", {stream}")] for stream in report.streams}
    general = [table for table in tables if not any(table in each for each in of_stream.values())]
    accuracy, *others = general
    folds = [Fold(f"By target, class and metric: {stream}", of_stream[stream]) for stream in report.streams]
    parts: list[Part] = [accuracy, _intervals(report), *others, *folds]
    return Section("Results", parts)


def _intervals(report: ReportFindings) -> Picture:
    panels = []
    for number, stream in enumerate(report.telling_streams):
        rows = sorted((r for r in report.bench.rows if r.stream == stream), key=lambda row: -row.accuracy.mean)
        panels.append(_panel(f"accuracy{number}", stream, rows))
    return Picture(
        panels,
        f"Accuracy, mean over targets, with 95 % intervals, on {' and '.join(report.telling_streams)}; one colour a "
        f"method, its variants included.",
    )


def _panel(name: str, stream: str, rows: Sequence[Row]) -> Panel:
    first, last = rows[0], rows[-1]
    said = (
        f"Accuracy of {len(rows)} methods on {stream}, each a dot with its interval, from {first.label} "
        f"({100 * first.accuracy.mean:.1f} %) at the top to {last.label} ({100 * last.accuracy.mean:.1f} %) below."
    )
    height = 0.22 * len(rows) + 0.9
    return panel(name, said, lambda ax: draw_intervals(ax, rows, "accuracy"), width=5.2, height=height, title=stream)
