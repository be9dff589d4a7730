"""`mergestream drift`: parse, call one function, print."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mergestream.cli.shared_options import AsJson
from mergestream.cli.terminal import command_text, progress, show_result
from mergestream.runtime.errors import InputError


class DriftCommand(TyperCommand):
    """`drift`, which names the new command if it is called with the former option --landscape."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(word.split("=")[0] == "--landscape" for word in args):
            raise InputError("The landscape is a command of its own: mergestream landscape POOL --dataset …")
        return super().parse_args(ctx, args)


def drift(
    pool: Annotated[Path, typer.Argument(help="A pool's folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the numbers, figures and the page.")],
    without: Annotated[
        list[str] | None, typer.Option(help="Leave this expert out, such as a target's own; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how far apart a pool's experts are, layer by layer, and what averaging them loses.

    Needs no images, and reads the weights in slices, so that a pool of large networks fits in little memory.
    """
    from mergestream.bench.drift.drift_report import FIGURES, PAGE, RECORD, describe_drift, run_drift

    measured = run_drift(pool, out, progress(stderr=as_json), command_text(), without or ())
    files = {"Page": out / PAGE, "Figures": out / FIGURES, "Numbers": out / RECORD}
    show_result(as_json, measured.to_json(), [], describe_drift(measured), files)
