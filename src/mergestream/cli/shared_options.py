"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer


def _load(references: list[str] | None) -> list[str] | None:
    if references:
        from mergestream.runtime.plugins import load_plugins

        load_plugins(references)
    return references


AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")]
DataOption = Annotated[
    list[str] | None, typer.Option("--data-option", help="An option of the data set, as in 'part=test'; repeatable.")
]
SkipBad = Annotated[int, typer.Option("--skip-bad", help="Leave out up to this many missing or unreadable images.")]
AllowMissingClasses = Annotated[
    bool, typer.Option("--allow-missing-classes", help="Accept a domain that lacks a class.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Engine = Annotated[str, typer.Option("--engine", help="local, or ray: a cluster that sees the same paths.")]
RequireSignedBy = Annotated[
    Path | None,
    typer.Option(help="Folder of trusted public keys and CA certificates; refuse what none of them has signed."),
]
Plugin = Annotated[
    list[str] | None,
    typer.Option(help="A module or .py file that registers methods or data sets; repeatable.", callback=_load),
]
