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
_DATASET = typer.Option(help="A data set by its name in 'data list'.")
DatasetName = Annotated[str, _DATASET]
OptionalDatasetName = Annotated[str | None, _DATASET]
Root = Annotated[Path | None, typer.Option(help="The data set's folder or zip.")]
DataOption = Annotated[
    list[str] | None, typer.Option("--data-option", help="An option of the data set, as in 'part=test'; repeatable.")
]
SkipBad = Annotated[int, typer.Option("--skip-bad", help="Leave out up to this many missing or unreadable images.")]
AllowMissingClasses = Annotated[
    bool, typer.Option("--allow-missing-classes", help="Accept a domain that lacks a class.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Engine = Annotated[str, typer.Option("--engine", help="local, or ray: a cluster that sees the same paths.")]
Jobs = Annotated[
    int | None, typer.Option(help="Processes on this machine.", show_default="one per core, or one per GPU")
]
Arg = Annotated[list[str] | None, typer.Option(help="An argument of the network, as in 'img_size=126'; repeatable.")]
Nested = Annotated[
    bool, typer.Option("--nested", help="Also for pools that leave one site out, as benchmarks need them.")
]
RequireSignedBy = Annotated[
    Path | None,
    typer.Option(help="Folder of trusted public keys and CA certificates; refuse what none of them has signed."),
]
Plugin = Annotated[
    list[str] | None,
    typer.Option(help="A module or .py file that registers methods or data sets; repeatable.", callback=_load),
]
