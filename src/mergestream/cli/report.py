"""`mergestream report`: parse, call one function, print."""

from pathlib import Path
from typing import Annotated

import typer

from mergestream.cli.terminal import command_text, progress, show


def report(
    runs: Annotated[Path, typer.Argument(help="A folder that 'bench --out' or 'demo --out' wrote.")],
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("report.html"),
    tables: Annotated[
        Path | None, typer.Option(help="Folder for every table as Markdown and LaTeX.", show_default="beside the page")
    ] = None,
    drift: Annotated[Path | None, typer.Option(help="A drift.json that 'mergestream drift' wrote.")] = None,
    landscape: Annotated[Path | None, typer.Option(help="A landscape.json that 'mergestream landscape' wrote.")] = None,
) -> None:
    """Make one self-contained HTML page from a folder of runs: tables, figures, ablation, cost, warnings, provenance.

    The page opens offline, prints well, and loads nothing from outside.
    """
    from mergestream.bench.analysis.duels import describe_duels
    from mergestream.bench.python_calls import report as make_report
    from mergestream.bench.report.report_page import tables_beside

    findings = make_report(
        runs, out, tables=tables, drift=drift, landscape=landscape, track=progress(), command=command_text()
    )
    warnings = [f"Warning: {sentence}" for sentence in findings.bench.sentences[:5]]
    files = {"Report": out, "Tables": tables or tables_beside(out)}
    show([], [*describe_duels(findings.bench.duels), *warnings], files)
