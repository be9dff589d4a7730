"""`mergestream demo`: parse, call one function, print."""

from pathlib import Path
from typing import Annotated

import typer

from mergestream.cli.shared_options import AsJson
from mergestream.cli.terminal import echo, progress, show_result


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
