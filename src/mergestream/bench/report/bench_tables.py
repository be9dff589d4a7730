"""The tables of a benchmark, and its findings as files: JSON, CSV, Markdown and LaTeX."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from mergestream.bench.analysis.bench_findings import BenchFindings, MethodRank, SubgroupRow
from mergestream.bench.analysis.comparison import EXPERT_ROWS, Estimate, GroupedRow, ResultRow, grouped
from mergestream.bench.analysis.duels import describe_duels
from mergestream.bench.report.duel_tables import duel_tables
from mergestream.bench.report.page import render_text
from mergestream.bench.report.result_table import ResultTable, format_number, grid_table, in_parts, mark_best, to_latex
from mergestream.pool.expert_card import library_versions
from mergestream.runtime.files import write_json, write_text

# Heading of a metric: field of a ResultRow, digits, factor. Two tables, since one would be too wide.
RANKING = {
    "accuracy %": ("accuracy", 1, 100),
    "balanced accuracy %": ("balanced_accuracy", 1, 100),
    "AUROC %": ("auroc", 1, 100),
    "AURC %": ("aurc", 1, 100),
    "lowest recall %": ("lowest_recall", 1, 100),
    "ms, logits given": ("milliseconds", 1, 1),
}
PROBABILITIES = {
    "NLL": ("nll", 3, 1),
    "Brier": ("brier", 3, 1),
    "ECE %": ("ece", 1, 100),
    "calibration in the large": ("calibration_in_the_large", 1, 100),
}
LOWER_IS_BETTER = ("AURC %", *PROBABILITIES)
METRIC_TABLES: dict[str, tuple[Mapping[str, tuple[str, int, float]], str]] = {
    "Accuracy and ranking": (
        RANKING,
        "Means over targets. AUROC: one class against the rest; AURC: area under the risk-coverage "
        "curve; lowest recall: of any class at any target; ms: one step with the experts' logits given, since they are "
        "computed once for all methods. On its own the ensemble needs K forwards per batch, entropy_adaptive "
        "K·(1 + views) + 1.",
    ),
    "Probabilities": (
        PROBABILITIES,
        "Means over targets, lower is better. Brier: summed over classes; ECE: 15 bins; calibration in the large: mean "
        "predicted probability less observed share in points, of the class where it is farthest from 0.",
    ),
}
PAGE_WIDTH, TERMINAL_WIDTH = 150, 100  # characters; wider tables of streams come in parts
HIGHEST = "highest among the methods (expert rows excluded)"


def main_tables(findings: BenchFindings, compact: bool = False) -> list[ResultTable]:
    """Accuracy, balanced accuracy and AUROC, methods by streams."""
    tables = [
        results_table(findings.rows, metric, f"{title} on {findings.dataset}", compact)
        for metric, title in (("accuracy", "Accuracy"), ("balanced_accuracy", "Balanced accuracy"))
    ]
    values = {(row.label, row.stream): row.auroc for row in findings.rows}
    note = f"One class against the rest, mean over targets in %; bold: {HIGHEST}."
    table = _percent_table(f"AUROC on {findings.dataset}", values, note)
    return [*tables, _with_short_names(table) if compact else table]


def terminal_tables(findings: BenchFindings) -> list[ResultTable]:
    """The main tables, narrow, and the probabilities; for a single stream also its targets."""
    streams = findings.streams
    targets = [target_table(findings.rows, streams[0])] if len(streams) == 1 else []
    probabilities = [_with_short_names(_metrics_table(findings.rows, stream, "Probabilities")) for stream in streams]
    main = [part for table in main_tables(findings, compact=True) for part in in_parts(table, TERMINAL_WIDTH)]
    return [*main, *targets, *probabilities]


def all_tables(findings: BenchFindings) -> list[ResultTable]:
    streams = findings.streams
    tables = main_tables(findings)
    tables += duel_tables(findings.duels)
    tables += _grouped_tables(findings.grouped)
    tables += [target_table(findings.rows, stream) for stream in streams]
    tables += [_metrics_table(findings.rows, stream, title) for stream in streams for title in METRIC_TABLES]
    tables += [_recall_table(findings.rows, stream) for stream in streams]
    tables += _lone_tables(findings.runs)
    tables += [_ranks_table(findings.standings)] if findings.standings else []
    kinds = list(dict.fromkeys(row.kind for row in findings.subgroups))
    tables += [_subgroups_table(findings.subgroups, kind, stream) for kind in kinds for stream in streams]
    by_stream = [set(table.columns[1:]) <= set(streams) for table in tables]
    parts = [in_parts(t, PAGE_WIDTH) if wide else [t] for t, wide in zip(tables, by_stream, strict=True)]
    return [table for own in parts for table in own]


def results_table(rows: Sequence[ResultRow], metric: str, title: str, compact: bool = False) -> ResultTable:
    """Methods by streams; the best method of each stream is bold.

    `compact` fits a terminal: the mean with half the interval's width.
    """
    estimates: dict[tuple[str, str], Estimate] = {(row.label, row.stream): getattr(row, metric) for row in rows}
    interval = "± half the width of the" if compact else "with the"
    note = f"Mean over targets in %, {interval} 95 % interval of a bootstrap over batches; bold: {HIGHEST}."
    table = grid_table(title, "method", estimates, lambda each: percent(each, compact), note=note)
    table = mark_best(table, EXPERT_ROWS)
    return _with_short_names(table) if compact else table


def _with_short_names(table: ResultTable) -> ResultTable:
    """Fit a terminal: variants as their options alone."""
    names = _indented([row[0] for row in table.rows])
    return replace(table, rows=tuple((name, *row[1:]) for name, row in zip(names, table.rows, strict=True)))


def _indented(labels: Sequence[str]) -> list[str]:
    """Shorten a variant that follows its method to the options that differ."""
    names, parent = [], ""
    for label in labels:
        method, _, options = label.partition("(")
        names.append(f"  {options.removesuffix(')')}" if options and method == parent else label)
        parent = parent if options else label
    return names


def target_table(rows: Sequence[ResultRow], stream: str) -> ResultTable:
    """Accuracy, methods by targets, in the usual layout of papers."""
    here = [row for row in rows if row.stream == stream]
    values = {(row.label, target): accuracy for row in here for target, accuracy in row.per_target.items()}
    values |= {(row.label, "mean"): row.accuracy.mean for row in here}
    note = f"Accuracy in %, mean over seeds and pools; bold: {HIGHEST}."
    return _percent_table(f"Accuracy per target, {stream}", values, note)


def _recall_table(rows: Sequence[ResultRow], stream: str) -> ResultTable:
    values = {(row.label, name): recall for row in rows if row.stream == stream for name, recall in row.recall.items()}
    note = "In %, mean over targets, seeds and pools. A class that a method no longer predicts shows here first."
    return _percent_table(f"Recall per class, {stream}", values, note)


def _percent_table(title: str, values: Mapping[tuple[str, str], float | None], note: str) -> ResultTable:
    table = grid_table(title, "method", values, lambda value: format_number(value, 1, 100), note=note)
    return mark_best(table, EXPERT_ROWS)


def _metrics_table(rows: Sequence[ResultRow], stream: str, title: str) -> ResultTable:
    """One of METRIC_TABLES: methods by metrics, on one stream."""
    metrics, note = METRIC_TABLES[title]
    entries = {}
    here = [row for row in rows if row.stream == stream]
    for row, (heading, (field, digits, factor)) in product(here, metrics.items()):
        value = getattr(row, field)
        entries[row.label, heading] = format_number(getattr(value, "mean", value), digits, factor)
    table = grid_table(f"{title}, {stream}", "method", entries, str, note=note)
    return mark_best(table, EXPERT_ROWS, LOWER_IS_BETTER, uncompared=("ms, logits given",))


def _lone_tables(runs: Sequence[Mapping[str, Any]]) -> list[ResultTable]:
    """How often the one image of a rare class in a batch is recognised; no table without streams of lone positives."""
    values: dict[tuple[str, str], list[float]] = {}
    for line in runs:
        if line["method"] != "single_expert" and line.get("lone_sensitivity") is not None:
            values.setdefault((line["label"], line["stream"]), []).append(line["lone_sensitivity"])
    note = (
        "Recall of the rare class in %, of which no batch has more than one image; mean over targets, seeds and pools."
    )
    means = {cell: mean(own) for cell, own in values.items()}
    return [_percent_table("Sensitivity of the lone positive", means, note)] if means else []


def _ranks_table(standings: Sequence[MethodRank]) -> ResultTable:
    entries = {(each.label, each.stream): each for each in standings}
    first = {min(own, key=lambda each: each.mean_rank) for own in grouped(standings, "stream").values()}
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
    return grid_table(title, "method", entries, lambda row: format_number(row.balanced_accuracy, 1, 100), note=note)


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
    """An estimate of a share, in per cent, with its interval where there is one."""
    if value is None:
        return "–"
    interval = f"[{100 * value.low:.1f}, {100 * value.high:.1f}]"
    if compact:
        interval = f"±{50 * (value.high - value.low):.1f}"
    return f"{100 * value.mean:.1f}" if math.isnan(value.low) else f"{100 * value.mean:.1f} {interval}"


def write_findings(findings: BenchFindings, out: Path) -> None:
    """Write results.json, results.csv (one line per run), results.md and results.tex under `out`."""
    write_json(out / "results.json", findings.to_json())
    write_text(out / "results.csv", _csv(findings.runs))
    tables = all_tables(findings)
    write_text(out / "results.tex", "\n".join(to_latex(table) for table in tables))
    text = render_text(
        "results.md.j2",
        findings=findings,
        tables=tables,
        duels=describe_duels(findings.duels),
        setup=describe_setup(findings),
        version=library_versions()["mergestream"],
        majority_shares=describe_majority_shares(findings.majority_shares),
    )
    write_text(out / "results.md", text)


def describe_majority_shares(shares: dict[str, float]) -> str:
    listed = ", ".join(f"{stream} {100 * share:.0f} %" for stream, share in shares.items())
    return f"Measured share of the most common class in a batch: {listed}."


def describe_setup(findings: BenchFindings) -> str:
    """What was run, in a few sentences."""
    lines = findings.runs
    targets = {line["target"]: line["images"] for line in lines}
    return render_text(
        "setup.txt.j2",
        findings=findings,
        targets=targets,
        seeds={line["stream_seed"] for line in lines},
        pools=max(len({line["pool"] for line in lines if line["target"] == name}) for name in targets),
        experts=sorted({line["experts"] for line in lines}),
    ).strip()


def _csv(lines: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for line in lines for column in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
