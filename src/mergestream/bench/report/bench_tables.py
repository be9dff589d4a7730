"""The tables of a benchmark."""

from collections.abc import Sequence
from typing import NamedTuple

from mergestream.bench.analysis.bench_findings import BenchFindings, Standing, SubgroupRow
from mergestream.bench.analysis.comparison import ORACLE, SINGLES, Duel, Estimate, ResultRow
from mergestream.bench.analysis.group_intervals import GroupedRow
from mergestream.bench.report.result_table import ResultTable, best_cells, grid_table

EXPERT_ROWS = (ORACLE, SINGLES)  # bounds, not methods: they are never bold


class MetricColumn(NamedTuple):
    """One column of the table of further metrics."""

    heading: str
    field: str  # of a ResultRow
    lower_is_better: bool | None
    factor: int
    digits: int


FURTHER_METRICS = (
    MetricColumn("AUROC %", "auroc", False, 100, 1),
    MetricColumn("ECE %", "ece", True, 100, 1),
    MetricColumn("Brier", "brier", True, 1, 3),
    MetricColumn("NLL", "nll", True, 1, 3),
    MetricColumn("AURC %", "aurc", True, 100, 1),
    MetricColumn("lowest recall %", "lowest_recall", False, 100, 1),
    MetricColumn("ms, logits given", "milliseconds", None, 1, 1),
)


def main_tables(findings: BenchFindings, compact: bool = False) -> list[ResultTable]:
    """Accuracy and balanced accuracy, methods by streams."""
    return [
        results_table(findings.rows, metric, f"{title} on {findings.dataset}", EXPERT_ROWS, compact)
        for metric, title in (("accuracy", "Accuracy"), ("balanced_accuracy", "Balanced accuracy"))
    ]


def terminal_tables(findings: BenchFindings) -> list[ResultTable]:
    """The main tables, narrow; for a single stream also its targets."""
    streams = _streams(findings.rows)
    targets = [target_table(findings.rows, streams[0])] if len(streams) == 1 else []
    return [*main_tables(findings, compact=True), *targets]


def all_tables(findings: BenchFindings) -> list[ResultTable]:
    streams = _streams(findings.rows)
    tables = main_tables(findings)
    if findings.duels:
        title = f"{findings.duels[0].ours} minus others, accuracy"
        tables += [duels_table(findings.duels, title), _across_targets_table(findings.duels, title)]
    tables += _grouped_tables(findings.grouped)
    tables += [target_table(findings.rows, stream) for stream in streams]
    tables += [_metrics_table(findings.rows, stream) for stream in streams]
    tables += [_recall_table(findings.rows, stream) for stream in streams]
    tables += [_standings_table(findings.standings)] if findings.standings else []
    kinds = list(dict.fromkeys(row.kind for row in findings.subgroups))
    tables += [_subgroups_table(findings.subgroups, kind, stream) for kind in kinds for stream in streams]
    return tables


def results_table(
    rows: Sequence[ResultRow], metric: str, title: str, bounds: Sequence[str] = (), compact: bool = False
) -> ResultTable:
    """Methods by streams; the best method of each stream is bold, rows in `bounds` do not compete.

    `compact` fits a terminal: the mean with half the interval's width.
    """
    estimates: dict[tuple[str, str], Estimate] = {(row.label, row.stream): getattr(row, metric) for row in rows}
    interval = "± half the width of the" if compact else "with the"
    among = " among the methods (expert rows excluded)" if bounds else ""
    note = f"Mean over targets in %, {interval} 95 % interval of a bootstrap over batches; bold: highest{among}."
    table = grid_table(title, "method", estimates, lambda each: percent(each, compact), note=note)
    labels, streams = [row[0] for row in table.rows], table.columns[1:]
    competing = [r for r, label in enumerate(labels) if label not in bounds]
    values = [[estimates[label, s].mean if (label, s) in estimates else None for s in streams] for label in labels]
    best = best_cells(table.rows, values, [False] * len(streams), competing)
    names = _indented(labels) if compact else labels
    cells = tuple((name, *row[1:]) for name, row in zip(names, table.rows, strict=True))
    return ResultTable(title, table.columns, cells, best, note)


def _indented(labels: Sequence[str]) -> list[str]:
    """Shorten a variant that follows its method to the options that differ."""
    names, parent = [], ""
    for label in labels:
        method, _, options = label.partition("(")
        names.append(f"  {options.removesuffix(')')}" if options and method == parent else label)
        parent = parent if options else label
    return names


def duels_table(duels: Sequence[Duel], title: str) -> ResultTable:
    """Paired differences to the reference, rivals by streams; clear wins and losses are bold."""
    entries = {(each.theirs, each.stream): each for each in duels}
    note = "Percentage points on the same batches, with the 95 % interval of a paired bootstrap; bold: it excludes 0."
    return grid_table(
        title, "against", entries, lambda each: each.difference.points(), lambda each: each.is_clear, note
    )


def _across_targets_table(duels: Sequence[Duel], title: str) -> ResultTable:
    def cell(each: Duel) -> str:
        return f"{each.across_targets.points()}, {each.wins}–{each.losses}–{each.ties}"

    entries = {(each.theirs, each.stream): each for each in duels}
    note = (
        "Percentage points, with the 95 % interval when targets are resampled as well as batches: what other targets "
        "like these might show; then wins–losses–ties over targets, seeds and pools. Bold: the interval excludes 0. "
        "Not corrected for the number of comparisons."
    )
    title = f"{title}, targets resampled too"
    return grid_table(title, "against", entries, cell, lambda each: each.holds_across_targets, note)


def target_table(rows: Sequence[ResultRow], stream: str) -> ResultTable:
    """Accuracy, methods by targets, in the usual layout of papers."""
    here = _of_stream(rows, stream)
    targets = list(dict.fromkeys(target for row in here for target in row.per_target))
    values = [[*(row.per_target.get(target) for target in targets), row.accuracy.mean] for row in here]
    note = "Accuracy in %, mean over seeds and pools; bold: highest among the methods (expert rows excluded)."
    return _percent_table(f"Accuracy per target, {stream}", here, (*targets, "mean"), values, note)


def _recall_table(rows: Sequence[ResultRow], stream: str) -> ResultTable:
    here = _of_stream(rows, stream)
    classes = tuple(here[0].recall)
    values = [[row.recall[name] for name in classes] for row in here]
    note = "In %, mean over targets, seeds and pools. A class that a method no longer predicts shows here first."
    return _percent_table(f"Recall per class, {stream}", here, classes, values, note)


def _percent_table(
    title: str, rows: Sequence[ResultRow], columns: tuple[str, ...], values: Sequence[Sequence[float | None]], note: str
) -> ResultTable:
    cells = tuple(
        (row.label, *(_number(value, 100, 1) for value in line)) for row, line in zip(rows, values, strict=True)
    )
    best = best_cells(cells, values, [False] * len(columns), _competing(rows))
    return ResultTable(title, ("method", *columns), cells, best, note)


def _metrics_table(rows: Sequence[ResultRow], stream: str) -> ResultTable:
    here = _of_stream(rows, stream)
    values = [[getattr(row, metric.field) for metric in FURTHER_METRICS] for row in here]
    cells = tuple(
        (row.label, *(_number(v, m.factor, m.digits) for v, m in zip(line, FURTHER_METRICS, strict=True)))
        for row, line in zip(here, values, strict=True)
    )
    note = (
        "Means over targets. AUROC: one class against the rest; ECE: 15 bins; AURC: area under the risk-coverage "
        "curve; lowest recall: of any class at any target; ms: one step with the experts' logits given, since they are "
        "computed once for all methods. On its own the ensemble needs K forwards per batch, entropy_adaptive "
        "K·(1 + views) + 1."
    )
    columns = ("method", *(metric.heading for metric in FURTHER_METRICS))
    best = best_cells(cells, values, [metric.lower_is_better for metric in FURTHER_METRICS], _competing(here))
    return ResultTable(f"Other metrics, {stream}", columns, cells, best, note)


def _standings_table(standings: Sequence[Standing]) -> ResultTable:
    entries = {(each.label, each.stream): each for each in standings}
    first = {
        min((each for each in standings if each.stream == stream), key=lambda each: each.mean_rank)
        for stream in _streams(standings)
    }
    note = "Mean rank by accuracy over targets, seeds and pools, 1 is best; in brackets wins–losses against all others."
    return grid_table(
        "Mean ranks",
        "method",
        entries,
        lambda each: f"{each.mean_rank:.2f} ({each.wins}–{each.losses})",
        lambda each: each in first,
        note,
    )


def _subgroups_table(rows: Sequence[SubgroupRow], kind: str, stream: str) -> ResultTable:
    here = [row for row in rows if row.kind == kind and row.stream == stream]
    images = {row.value: row.images for row in here}
    entries = {(row.label, f"{row.value} (n={images[row.value]})"): row for row in here}
    title, note = f"Balanced accuracy by {kind}, {stream}", "In %, weighted by images."
    return grid_table(title, "method", entries, lambda row: _number(row.balanced_accuracy, 100, 1), note=note)


def _grouped_tables(rows: Sequence[GroupedRow]) -> list[ResultTable]:
    """One table per metric, with intervals of a bootstrap over slides or patients."""
    note = "Mean over targets in %, with the 95 % interval of a bootstrap over whole groups (slides or patients)."
    titles = {"accuracy": "Accuracy", "balanced_accuracy": "Balanced accuracy", "auroc": "AUROC"} if rows else {}
    return [
        grid_table(
            f"{title}, groups resampled",
            "method",
            {(row.label, row.stream): getattr(row, metric) for row in rows},
            percent,
            note=note,
        )
        for metric, title in titles.items()
    ]


def percent(value: Estimate | None, compact: bool = False) -> str:
    """An estimate of a share, in per cent."""
    if value is None:
        return "–"
    if compact:
        return f"{100 * value.mean:.1f} ±{50 * (value.high - value.low):.1f}"
    return f"{100 * value.mean:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def _streams(rows: Sequence[ResultRow] | Sequence[Standing]) -> list[str]:
    return list(dict.fromkeys(row.stream for row in rows))


def _of_stream(rows: Sequence[ResultRow], stream: str) -> list[ResultRow]:
    return [row for row in rows if row.stream == stream]


def _competing(rows: Sequence[ResultRow]) -> list[int]:
    return [r for r, row in enumerate(rows) if row.label not in EXPERT_ROWS]


def _number(value: float | None, factor: float, digits: int) -> str:
    return "–" if value is None else f"{factor * value:.{digits}f}"
