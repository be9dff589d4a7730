"""`mergestream methods`: parse, call one function, print."""

from dataclasses import asdict
from typing import Annotated

import typer

from mergestream.cli.shared_options import AsJson, Plugin
from mergestream.cli.terminal import print_result


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, with its options.", show_default="all")] = None,
    options: Annotated[bool, typer.Option("--options", help="Also list the options and their defaults.")] = False,
    plugin: Plugin = None,  # noqa: ARG001
    as_json: AsJson = False,
) -> None:
    """List the methods: what each does, and how many forwards it takes per image of a pool with K experts.

    Methods of installed packages and of --plugin are marked; their runs count their forwards. A package that cannot be
    used is listed with the reason.
    """
    from mergestream.methods import list_methods
    from mergestream.methods.listing import in_words, summary_of

    listed = [summary_of(each) for each in ([name] if name else list_methods())]
    lines = [line for each in listed for line in in_words(each, with_options=options or name is not None)]
    print_result(as_json, [asdict(each) for each in listed], lines, ok=not (name and listed[0].problem))
