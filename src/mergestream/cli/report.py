"""`mergestream demo` and `report`: parse, call one function, print."""

from pathlib import Path
from typing import Annotated

import typer

from mergestream.cli.shared_options import AsJson
from mergestream.cli.terminal import command_text, echo, progress, show, show_result


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Where to write all of it.", show_default="demo, or demo-quick with --quick")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller version that takes about a minute.")] = False,
    as_json: AsJson = False,
) -> None:
    """The whole journey on the embedded phantom hospitals: train experts, leave each hospital out, compare methods.

    The data are synthetic. What is done already under --out is not done again.
    """
    from mergestream.bench.demo import FULL, QUICK, run_demo
    from mergestream.bench.report.bench_tables import terminal_tables
    from mergestream.bench.report.demo_story import story_sentences
    from mergestream.bench.report.page import page_notice

    out = out or Path("demo-quick" if quick else "demo")
    echo(page_notice(synthetic=True), err=as_json)
    command = f"mergestream demo --out {out}" + (" --quick" if quick else "")
    report = run_demo(out, QUICK if quick else FULL, progress(stderr=as_json), command)
    files = {"Report": out / "report.html", "Numbers": out / "results.json", "Records": out / "runs"}
    tables, sentences = terminal_tables(report.bench)[:1], story_sentences(report)
    show_result(as_json, report.provenance.results, tables, sentences, files)


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
