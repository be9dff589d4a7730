"""A benchmark's findings as files: JSON, CSV, Markdown and LaTeX."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergestream.bench.analysis.bench_findings import BenchFindings
from mergestream.bench.analysis.comparison import describe_duels
from mergestream.bench.report.bench_tables import all_tables
from mergestream.bench.report.page import NOTICE
from mergestream.bench.report.result_table import to_latex, to_markdown
from mergestream.pool.expert_card import library_versions
from mergestream.runtime.files import write_json, write_text


def write_findings(findings: BenchFindings, out: Path) -> None:
    """Write results.json, results.csv (one line per run), results.md and results.tex under `out`."""
    write_json(out / "results.json", findings.to_json())
    write_text(out / "results.csv", _csv(findings.runs))
    write_text(out / "results.md", _markdown(findings))
    write_text(out / "results.tex", "\n".join(to_latex(table) for table in all_tables(findings)))


def _markdown(findings: BenchFindings) -> str:
    parts = [f"# {findings.dataset}", f"`{findings.command}`" if findings.command else "", NOTICE]
    if findings.synthetic:
        parts.append("The data are synthetic.")
    parts.append(_bullets(describe_duels(findings.duels)))
    parts.append(_bullets(_setup_lines(findings)))
    parts.append(describe_majority_shares(findings.majority_shares))
    if findings.sentences:
        parts += ["## Warnings", _bullets(findings.sentences)]
    for table in all_tables(findings):
        parts += [f"## {table.title}", to_markdown(table).rstrip(), table.note]
    return "\n\n".join(part for part in parts if part) + "\n"


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def describe_majority_shares(shares: dict[str, float]) -> str:
    listed = ", ".join(f"{stream} {100 * share:.0f} %" for stream, share in shares.items())
    return f"Measured share of the most common class in a batch: {listed}."


def _setup_lines(findings: BenchFindings) -> list[str]:
    """What was run, in a few lines."""
    plan, runs = findings.plan, findings.runs
    targets = {line["target"]: line for line in runs}
    sizes = ", ".join(
        f"{name} ({line['images']:,} images, {line['batches']} batches)" for name, line in targets.items()
    )
    experts = sorted({line["experts"] for line in runs})
    worst = [
        f"{row.label} on {row.stream}: worst at {row.worst_target}, {100 * row.per_target[row.worst_target]:.1f} %"
        for row in findings.rows
        if findings.duels and row.label == findings.duels[0].ours
    ]
    return [
        f"Targets: {sizes}.",
        f"Protocol {plan['protocol']}; batches of {plan['batch_size']}; stream seeds {_joined(plan['seeds'])}; pools: "
        f"{len(plan['pools'])}; experts per target: {_joined(experts)}; network: {findings.network}.",
        *worst,
        f"mergestream {library_versions()['mergestream']}; all arguments and hashes: results.json, runs/*/run.json.",
    ]


def _joined(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _csv(lines: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for line in lines for column in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in line.items()} for line in lines)
    return text.getvalue()
