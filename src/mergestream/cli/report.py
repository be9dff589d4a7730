"""`mergestream report`: parse, call one function, print."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mergestream.cli.terminal import command_text, progress, show


def report(
    runs: Annotated[Path, typer.Argument(help="What 'bench --out' or 'demo --out' wrote.")],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    tables: Annotated[
        Path | None,
        typer.Option(help="Folder of every table as Markdown and LaTeX.", show_default="beside the page"),
    ] = None,
    drift: Annotated[Path | None, typer.Option(help="A drift.json that 'mergestream drift' wrote.")] = None,
    landscape: Annotated[Path | None, typer.Option(help="A landscape.json that 'drift --landscape' wrote.")] = None,
) -> None:
    """One self-contained HTML page from a folder of runs: tables, figures, ablation, cost, warnings, provenance.

    It opens offline, prints, and asks for nothing outside it.
    """
    from mergestream.bench.analysis.comparison import in_words
    from mergestream.bench.report.report import tables_beside
    from mergestream.bench.report.report_run import make_report

    console = Console()
    findings = make_report(
        runs, out, progress(console), command=command_text(), tables=tables, drift=drift, landscape=landscape
    )
    warnings = [f"Warning: {sentence}" for sentence in findings.bench.sentences[:5]]
    files = {"Report": out, "Tables": tables or tables_beside(out)}
    show(console, [], [*in_words(findings.bench.duels), *warnings], files)
