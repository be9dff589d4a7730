"""A benchmark's findings as tables: for the terminal, Markdown, LaTeX, CSV and JSON."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mergestream.bench.analysis.collapse import Collapse, collapses_in_words
from mergestream.bench.analysis.comparison import ORACLE, SINGLES, Duel, Row, in_words
from mergestream.bench.analysis.standings import Standing
from mergestream.bench.analysis.subgroups import SubgroupRow
from mergestream.bench.report.tables import Table, duels_table, results_table, to_latex, to_markdown
from mergestream.pool.expert_card import library_versions
from mergestream.runtime.files import write_json, write_text

SCHEMA_VERSION = 1
NOTICE = "For research. Not a medical device."
SAME = 5e-5  # two numbers that look equal in a table are equal
# Of the other metrics: heading, field of a row, whether lower is better, factor, digits.
OTHERS: tuple[tuple[str, str, bool | None, int, int], ...] = (
    ("AUROC %", "auroc", False, 100, 1),
    ("ECE %", "ece", True, 100, 1),
    ("Brier", "brier", True, 1, 3),
    ("NLL", "nll", True, 1, 3),
    ("AURC %", "aurc", True, 100, 1),
    ("lowest recall %", "lowest_recall", False, 100, 1),
    ("ms, scores given", "milliseconds", None, 1, 1),
)


@dataclass(frozen=True)
class BenchFindings:
    """All that a benchmark shows."""

    plan: dict[str, Any]
    command: str
    rows: list[Row]
    duels: list[Duel]
    standings: list[Standing]
    majority_shares: dict[str, float]
    subgroups: list[SubgroupRow]
    collapses: list[Collapse]
    left_out: list[tuple[str, str]]
    warnings: list[str]
    runs: list[dict[str, Any]]
    dataset: str
    synthetic: bool
    network: str

    @property
    def sentences(self) -> list[str]:
        """What should be read beside the tables."""
        said = list(self.warnings)
        said += [f"Left out: {label}. {why}" for label, why in self.left_out]
        return said + collapses_in_words(self.collapses)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "dataset": self.dataset,
            "synthetic": self.synthetic,
            "network": self.network,
            "command": self.command,
            "plan": self.plan,
            "results": [row.to_json() for row in self.rows],
            "duels": [asdict(each) for each in self.duels],
            "majority_shares": self.majority_shares,
            "standings": [asdict(each) for each in self.standings],
            "subgroups": [asdict(each) for each in self.subgroups],
            "collapses": [asdict(each) for each in self.collapses],
            "left_out": [{"method": label, "why": why} for label, why in self.left_out],
            "warnings": self.warnings,
            "environment": library_versions(),
        }


def write_findings(findings: BenchFindings, out: Path) -> None:
    """results.json, results.csv (a line a run), results.md and results.tex under `out`."""
    write_json(out / "results.json", findings.to_json())
    write_text(out / "results.csv", _csv(findings.runs))
    write_text(out / "results.md", _markdown(findings))
    write_text(out / "results.tex", "\n".join(to_latex(table) for table in all_tables(findings)))


def what_was_run(findings: BenchFindings) -> list[str]:
    """What a reader must know to believe the tables, in a few lines."""
    plan, runs = findings.plan, findings.runs
    targets = {line["target"]: line for line in runs}
    told = ", ".join(f"{name} ({line['images']:,} images, {line['batches']} batches)" for name, line in targets.items())
    experts = sorted({line["experts"] for line in runs})
    worst = [
        f"{row.label} on {row.stream}: worst at {row.worst_target}, {100 * row.per_target[row.worst_target]:.1f} %"
        for row in findings.rows
        if findings.duels and row.label == findings.duels[0].ours
    ]
    return [
        f"Targets: {told}.",
        f"Protocol {plan['protocol']}; batches of {plan['batch_size']}; stream seeds {_joined(plan['seeds'])}; pools: "
        f"{len(plan['pools'])}; experts a target: {_joined(experts)}; network: {findings.network}.",
        *worst,
        f"mergestream {library_versions()['mergestream']}; all arguments and hashes: results.json, runs/*/run.json.",
    ]


def _joined(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def main_tables(findings: BenchFindings, compact: bool = False) -> list[Table]:
    """Accuracy and balanced accuracy, methods by streams."""
    return [
        results_table(findings.rows, metric, f"{title} on {findings.dataset}", (ORACLE, SINGLES), compact)
        for metric, title in (("accuracy", "Accuracy"), ("balanced_accuracy", "Balanced accuracy"))
    ]


def terminal_tables(findings: BenchFindings) -> list[Table]:
    """The main tables, narrow; of a single stream also its targets."""
    streams = list(dict.fromkeys(row.stream for row in findings.rows))
    targets = [per_target(findings.rows, streams[0])] if len(streams) == 1 else []
    return [*main_tables(findings, compact=True), *targets]


def all_tables(findings: BenchFindings) -> list[Table]:
    streams = list(dict.fromkeys(row.stream for row in findings.rows))
    tables = main_tables(findings)
    if findings.duels:
        ours = findings.duels[0].ours
        tables.append(duels_table(findings.duels, f"{ours} minus others, accuracy"))
        tables.append(_across_targets(findings.duels, f"{ours} minus others, accuracy, targets resampled too"))
    tables += [per_target(findings.rows, stream) for stream in streams]
    tables += [_others(findings.rows, stream) for stream in streams]
    tables += [_recalls(findings.rows, stream) for stream in streams]
    tables += [_standings(findings.standings)] if findings.standings else []
    kinds = list(dict.fromkeys(row.kind for row in findings.subgroups))
    tables += [_subgroups(findings.subgroups, kind, stream) for kind in kinds for stream in streams]
    return tables


def per_target(rows: Sequence[Row], stream: str) -> Table:
    """Accuracy, methods by targets, as the papers of the field print it."""
    here = [row for row in rows if row.stream == stream]
    targets = list(dict.fromkeys(target for row in here for target in row.per_target))
    cells = [
        (row.label, *(_number(row.per_target.get(t), 100, 1) for t in targets), f"{100 * row.accuracy.mean:.1f}")
        for row in here
    ]
    values = [[*(row.per_target.get(t) for t in targets), row.accuracy.mean] for row in here]
    note = "Accuracy in %, mean over seeds and pools; bold: highest of the methods, expert rows aside."
    return Table(
        f"Accuracy per target, {stream}",
        ("method", *targets, "mean"),
        tuple(cells),
        _best(here, values, [False] * (len(targets) + 1)),
        note,
    )


def _others(rows: Sequence[Row], stream: str) -> Table:
    here = [row for row in rows if row.stream == stream]
    values = [[getattr(row, name) for _, name, *_ in OTHERS] for row in here]
    cells = [
        (row.label, *(_number(v, factor, digits) for v, (*_, factor, digits) in zip(line, OTHERS, strict=True)))
        for row, line in zip(here, values, strict=True)
    ]
    note = (
        "Means over targets. AUROC: one class against the rest; ECE: 15 bins; AURC: area under the risk-coverage "
        "curve; lowest recall: of any class at any target; ms: a step whose experts' logits are given, since they are "
        "computed once for all: alone, the ensemble needs K forwards a batch, entropy_adaptive K·(1 + views) + 1."
    )
    columns = ("method", *(heading for heading, *_ in OTHERS))
    lower = [each[2] for each in OTHERS]
    return Table(f"Other metrics, {stream}", columns, tuple(cells), _best(here, values, lower), note)


def _recalls(rows: Sequence[Row], stream: str) -> Table:
    here = [row for row in rows if row.stream == stream]
    classes = list(here[0].recall)
    cells = tuple((row.label, *(_number(row.recall[name], 100, 1) for name in classes)) for row in here)
    values = [[row.recall[name] for name in classes] for row in here]
    best = _best(here, values, [False] * len(classes))
    note = "In %, mean over targets, seeds and pools; a class that vanishes shows here first."
    return Table(f"Recall per class, {stream}", ("method", *classes), cells, best, note)


def _best(rows: Sequence[Row], values: list[list[Any]], lower: Sequence[bool | None]) -> frozenset[tuple[int, int]]:
    """The best cells of every column, among rows that are methods; no column of which neither way is better (None)."""
    competing = [r for r, row in enumerate(rows) if row.label not in (ORACLE, SINGLES)]
    best = set()
    for column, low in enumerate(lower):
        known = {r: values[r][column] for r in competing if values[r][column] is not None}
        if known and low is not None:
            top = (min if low else max)(known.values())
            best |= {(r, column + 1) for r, value in known.items() if abs(value - top) < SAME}
    return frozenset(best)


def _across_targets(duels: Sequence[Duel], title: str) -> Table:
    rivals, streams = (list(dict.fromkeys(getattr(d, key) for d in duels)) for key in ("theirs", "stream"))
    found = {(each.theirs, each.stream): each for each in duels}

    def cell(each: Duel | None) -> str:
        if each is None:
            return "–"
        mean, low, high = (
            100 * x for x in (each.across_targets.mean, each.across_targets.low, each.across_targets.high)
        )
        return f"{mean:+.1f} [{low:.1f}, {high:.1f}], {each.wins}–{each.losses}–{each.ties}"

    cells = tuple((rival, *(cell(found.get((rival, stream))) for stream in streams)) for rival in rivals)
    clear = {
        (r, c)
        for r, rival in enumerate(rivals)
        for c, stream in enumerate(streams, start=1)
        if (rival, stream) in found and found[rival, stream].holds_across_targets
    }
    note = (
        "Points, with the 95 % interval when targets are resampled as well as batches: what other targets like these "
        "might show; then wins–losses–ties over targets, seeds and pools. Bold: the interval excludes 0. Nothing is "
        "corrected for the number of comparisons."
    )
    return Table(title, ("against", *streams), cells, frozenset(clear), note)


def _standings(found: Sequence[Standing]) -> Table:
    labels, streams = (list(dict.fromkeys(getattr(s, key) for s in found)) for key in ("label", "stream"))
    known = {(each.label, each.stream): each for each in found}

    def cell(each: Standing | None) -> str:
        return "–" if each is None else f"{each.mean_rank:.2f} ({each.wins}–{each.losses})"

    cells = tuple((label, *(cell(known.get((label, stream))) for stream in streams)) for label in labels)
    best = set()
    for column, stream in enumerate(streams, start=1):
        here = [(known[label, stream].mean_rank, r) for r, label in enumerate(labels) if (label, stream) in known]
        best.add((min(here)[1], column))
    note = "Mean rank by accuracy over targets, seeds and pools, 1 is best; in brackets wins–losses against all others."
    return Table("Mean ranks", ("method", *streams), cells, frozenset(best), note)


def _subgroups(rows: Sequence[SubgroupRow], kind: str, stream: str) -> Table:
    here = [row for row in rows if row.kind == kind and row.stream == stream]
    labels, values = (list(dict.fromkeys(getattr(row, key) for row in here)) for key in ("label", "value"))
    known = {(row.label, row.value): row for row in here}
    sizes = {row.value: row.images for row in here}
    cells = tuple(
        (label, *(_number(known[label, v].balanced_accuracy if (label, v) in known else None, 100, 1) for v in values))
        for label in labels
    )
    columns = ("method", *(f"{value} (n={sizes[value]})" for value in values))
    return Table(f"Balanced accuracy by {kind}, {stream}", columns, cells, note="In %, weighted by images.")


def _number(value: float | None, factor: float, digits: int) -> str:
    return "–" if value is None else f"{factor * value:.{digits}f}"


def _markdown(findings: BenchFindings) -> str:
    parts = [f"# {findings.dataset}", f"`{findings.command}`" if findings.command else "", NOTICE]
    if findings.synthetic:
        parts.append("The data are synthetic.")
    parts.append("\n".join(f"- {sentence}" for sentence in in_words(findings.duels)))
    parts.append("\n".join(f"- {line}" for line in what_was_run(findings)))
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in findings.majority_shares.items())
    parts.append(f"Share of a batch's commonest class, as it came out: {shares}.")
    if findings.sentences:
        parts += ["## Warnings", "\n".join(f"- {sentence}" for sentence in findings.sentences)]
    for table in all_tables(findings):
        parts += [f"## {table.title}", to_markdown(table).rstrip(), table.note]
    return "\n\n".join(part for part in parts if part) + "\n"


def _csv(lines: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for line in lines for column in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in line.items()} for line in lines)
    return text.getvalue()
