"""Options that several commands share."""

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")]
DataOption = Annotated[
    list[str] | None, typer.Option("--data-option", help="An option of the data set, as in 'part=test'; repeatable.")
]
SkipBad = Annotated[int, typer.Option("--skip-bad", help="Leave out up to this many missing or unreadable images.")]
AllowMissingClasses = Annotated[
    bool, typer.Option("--allow-missing-classes", help="Accept a domain that lacks a class.")
]
Engine = Annotated[str, typer.Option("--engine", help="local, or ray: a cluster that sees the same paths.")]
