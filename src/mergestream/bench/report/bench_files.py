"""A benchmark's findings as files: JSON, CSV, Markdown and LaTeX."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergestream.bench.analysis.bench_findings import BenchFindings
from mergestream.bench.analysis.comparison import describe_duels
from mergestream.bench.report.bench_tables import all_tables
from mergestream.bench.report.page import render_text
from mergestream.bench.report.result_table import to_latex
from mergestream.pool.expert_card import library_versions
from mergestream.runtime.files import write_json, write_text


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
        seeds={line["seed"] for line in lines},
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
