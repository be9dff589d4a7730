"""The command line: parse, call one function, print."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mergestream import __version__
from mergestream.errors import MergestreamError

if TYPE_CHECKING:
    from mergestream.demo import Track

app = typer.Typer(
    name="mergestream",
    help="Many hospitals' models in, one model per batch out: online, label-free, forward passes only.",
    epilog="For research. Not a medical device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mergestream {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error, and log details.")] = False,
) -> None:
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(name)s: %(message)s")


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Where to write all of it.", show_default="demo, or demo-quick with --quick")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller version that ends within a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")] = False,
) -> None:
    """The whole story on the embedded phantom hospitals: train experts, leave each hospital out, compare methods.

    The data are synthetic. What is done already under --out is not done again.
    """
    from mergestream.analysis.comparison import in_words
    from mergestream.demo import Plan, run_demo
    from mergestream.reporting.demo_report import DIFFERENCES, SYNTHETIC, main_tables
    from mergestream.reporting.page import NOTICE
    from mergestream.reporting.tables import to_rich

    out = out or Path("demo-quick" if quick else "demo")
    console = Console(stderr=as_json)
    console.print(f"{SYNTHETIC} {NOTICE}", soft_wrap=True)
    command = f"mergestream demo --out {out}" + (" --quick" if quick else "")
    findings = run_demo(out, Plan.quick() if quick else Plan.full(), _progress(console), command)
    if as_json:
        typer.echo((out / "results.json").read_text(encoding="utf-8"))
        return
    for table in main_tables(findings, compact=True):
        console.print(to_rich(table))
    for sentence in in_words(findings.duels):
        console.print(sentence, highlight=False, soft_wrap=True)
    console.print(DIFFERENCES, highlight=False, soft_wrap=True)
    for what, name in (("Report", "report.html"), ("Numbers", "results.json"), ("Records", "runs")):
        console.print(f"{what}: {out / name}", highlight=False, soft_wrap=True)


def _progress(console: Console) -> "Track":
    @contextmanager
    def track(title: str, total: int) -> Iterator[Callable[[], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task)
            progress.update(task, completed=total)

    return track


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage. Errors are one line on stderr; a traceback only with --debug."""
    try:
        app(standalone_mode=True)
    except MergestreamError as error:
        if "--debug" in sys.argv:
            raise
        typer.echo(f"mergestream: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
