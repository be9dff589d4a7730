"""What commands show: progress with the time left, tables, sentences."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from mergestream.parallel import Track
    from mergestream.reporting.tables import Table


def show(console: Console, tables: Sequence["Table"], sentences: Sequence[str], files: dict[str, Path]) -> None:
    from mergestream.reporting.tables import to_rich

    for table in tables:
        console.print(to_rich(table))
    for line in (*sentences, *(f"{what}: {path}" for what, path in files.items())):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def progress(console: Console) -> "Track":
    @contextmanager
    def track(title: str, total: int) -> Iterator[Callable[[], None]]:
        if total == 0:
            yield lambda: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task)
            progress.update(task, completed=total)

    return track
