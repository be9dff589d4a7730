"""Terminal output of the commands: progress with the time left, tables, lines, JSON."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mergestream.runtime.messages import printable

if TYPE_CHECKING:
    from mergestream.bench.report.result_table import ResultTable
    from mergestream.runtime.parallel import Advance, Track


def command_text() -> str:
    """Return the command as the user typed it, for records and pages."""
    return shlex.join(["mergestream", *sys.argv[1:]])


def echo(*lines: str, err: bool = False) -> None:
    """Print lines. All output of commands goes through here or `show`: nothing in it can act on the terminal."""
    typer.echo("\n".join(map(printable, lines)), err=err)


def print_result(as_json: bool, value: Any, lines: Sequence[str] = (), *, ok: bool = True) -> None:
    """Print the value as JSON, or the lines. Exit code 1 if the result is not ok."""
    echo(*(json.dumps(value, indent=2, ensure_ascii=False).split("\n") if as_json else lines))
    if not ok:
        raise typer.Exit(1)


def show(tables: Sequence["ResultTable"], sentences: Sequence[str], files: dict[str, Path]) -> None:
    """Print tables, sentences, and where the files are."""
    from mergestream.bench.report.result_table import to_rich

    console = Console()
    for table in tables:
        console.print(to_rich(table))
    for line in (*sentences, *(f"{what}: {path}" for what, path in files.items())):
        console.print(printable(line), highlight=False, soft_wrap=True, markup=False)


def show_result(
    as_json: bool, value: Any, tables: Sequence["ResultTable"], sentences: Sequence[str], files: dict[str, Path]
) -> None:
    """Print the value as JSON and nothing else, or what `show` prints."""
    if as_json:
        print_result(True, value)
    else:
        show(tables, sentences, files)


def progress(*, stderr: bool = False) -> "Track":
    """Return a `Track` that draws a progress bar for every stage of work; on stderr where stdout is for JSON."""
    console = Console(stderr=stderr)

    @contextmanager
    def track(title: str, total: int) -> Iterator["Advance"]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        note_column = TextColumn("{task.fields[note]}", markup=False)
        with Progress(*columns, TimeRemainingColumn(), note_column, console=console, disable=total == 0) as progress:
            task = progress.add_task(printable(title), total=total, note="")

            def advance(steps: int = 1, note: str = "") -> None:
                progress.advance(task, steps)
                if note:
                    progress.update(task, note=printable(note))

            yield advance
            progress.update(task, completed=total)

    return track
