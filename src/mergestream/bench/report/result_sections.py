"""Parts of the report's sections on results: tables, accuracy, ablation."""

from mergestream.bench.analysis.duels import describe_levels
from mergestream.bench.report.bench_tables import all_tables
from mergestream.bench.report.figures import Panel, panel
from mergestream.bench.report.method_figures import draw_accuracies, draw_differences
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable, format_number, grid_table

DIFFERENCES = (
    "In brackets: the difference in points on the same batches; its interval and the margin decide which word is used."
)
# Options as labels spell them, and what they change.
MEANINGS = {
    "head=shared": "entropy only: the head follows the encoder",
    "encoder=uniform": "decoupled head only: the encoder is the mean",
    "head=select": "the head of one expert",
    "momentum=": "with a moving average",
    "views=()": "without consistency",
    "views=": "consistency under other views",
    "temperature=card": "each expert's own temperature",
    "score=max_softmax": "maximum softmax instead of entropy",
    "weighting=softmax": "softmax instead of inverse weighting",
    "refresh_every=": "experts scored on some batches only",
    "recalibrate_bn=True": "BatchNorm re-estimated on every batch",
    "head_rows=seen": "head rows of experts that saw the class",
}


def result_tables(report: ReportFindings) -> tuple[list[ResultTable], dict[str, list[ResultTable]]]:
    """Tables over all streams, and those of each stream."""
    tables = all_tables(report.bench)
    by_stream = {stream: [t for t in tables if t.title.endswith(f", {stream}")] for stream in report.bench.streams}
    return [table for table in tables if not any(table in group for group in by_stream.values())], by_stream


def accuracy_panels(report: ReportFindings) -> list[Panel]:
    panels = []
    for number, stream in enumerate(report.figure_streams):
        variants = {label for label in report.bench.methods if label not in report.plain_methods}
        here = (row for row in report.bench.rows if row.stream == stream and row.label not in variants)
        rows = sorted(here, key=lambda row: -row.accuracy.mean)
        first, last = rows[0], rows[-1]
        alternative = (
            f"Accuracy of {len(rows)} methods on {stream}, each a dot with its interval, from {first.label} "
            f"({100 * first.accuracy.mean:.1f} %) at the top to {last.label} ({100 * last.accuracy.mean:.1f} %) below."
        )
        height = 0.22 * len(rows) + 0.9
        panels.append(panel(f"accuracy{number}", alternative, draw_accuracies, rows, height=height, title=stream))
    return panels


def ablation_panels(report: ReportFindings) -> list[Panel]:
    panels = []
    for number, stream in enumerate(report.figure_streams):
        here = [each for each in report.ablation if each.stream == stream]
        differences = "; ".join(f"{each.theirs} {-100 * each.difference.mean:+.1f}" for each in here)
        alternative = f"Differences to the full method on {stream}, in points: {differences}."
        height = 0.28 * len(here) + 1.0
        panels.append(panel(f"ablation{number}", alternative, draw_differences, here, height=height, title=stream))
    return panels


def ablation_table(report: ReportFindings) -> ResultTable:
    full = report.ablation[0].ours
    cells = {(full, "what changes"): ("the full method", False)}  # text and whether it is bold
    cells |= {
        (r.label, r.stream): (format_number(r.accuracy.mean, 1, 100), False)
        for r in report.bench.rows
        if r.label == full
    }
    for each in report.ablation:
        # + 0.0: no minus before 0
        mean, high, low = (round(-100 * x, 1) + 0.0 for x in vars(each.difference).values())
        text = f"{100 * each.their_mean:.1f} ({mean:+.1f} [{low:.1f}, {high:.1f}])"
        cells[each.theirs, "what changes"] = describe_options(each.theirs), False
        cells[each.theirs, each.stream] = text, each.difference.is_clear
    note = (
        f"Accuracy in %; in brackets the points above the full method on the same batches, with the 95 % interval of a "
        f"hierarchical bootstrap. {describe_levels(report.ablation)} Bold: it excludes 0."
    )
    return grid_table(f"Ablation of {full}", "method", cells, lambda each: each[0], lambda each: each[1], note)


def describe_options(label: str) -> str:
    """What the options in a variant's label change."""
    options = label.partition("(")[2].removesuffix(")")
    present = [option for option in MEANINGS if option in options]
    # 'views=' does not apply where the more specific 'views=()' does.
    exact = [o for o in present if not any(other != o and other.startswith(o) for other in present)]
    return "; ".join(MEANINGS[option] for option in exact)
