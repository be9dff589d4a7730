"""`mergestream data`: list, verify and imitate data sets."""

from pathlib import Path
from typing import Annotated

import typer

from mergestream.cli.shared_options import AsJson, DataOption, Plugin
from mergestream.cli.terminal import echo, print_result, progress

data = typer.Typer(help="Data sets: list them, verify a copy, write a tiny stand-in.", no_args_is_help=True)


@data.command("list")
def list_data(plugin: Plugin = None, as_json: AsJson = False) -> None:  # noqa: ARG001
    """List every data set: content, domains, classes, licence, and where to get it."""
    from mergestream.bench.report.provenance_sections import describe_card
    from mergestream.data.datasets import DATASETS

    cards = [source.card for source in DATASETS.usable().values()]
    lines = []
    for card in cards:
        origin = DATASETS.origin(card.name)
        lines += [*describe_card(card), *([f"  plugin: {origin}"] if origin else []), ""]
    print_result(as_json, [card.to_json() for card in cards], lines)


@data.command("verify")
def verify_data(
    name: Annotated[str, typer.Argument(help="A data set by its name in 'data list'.")],
    root: Annotated[Path, typer.Argument(help="Its folder or zip.")],
    report: Annotated[
        Path | None, typer.Option(help="Write counts, sizes and versions to paste into an issue; no file names.")
    ] = None,
    data_option: DataOption = None,
    plugin: Plugin = None,  # noqa: ARG001
    as_json: AsJson = False,
) -> None:
    """Check that a copy is complete by reading every image. Exit code 1 if something is missing or differs."""
    from mergestream.data.datasets import file_source_of
    from mergestream.data.datasets.dataset_sources import verify
    from mergestream.data.datasets.roots import Root
    from mergestream.data.datasets.verification_report import describe_verification, refusal_lines, report_lines
    from mergestream.runtime.errors import DataError
    from mergestream.runtime.files import write_text
    from mergestream.runtime.option_checks import parse_options

    options = dict(parse_options(data_option or []))
    source = file_source_of(name)
    try:
        result = verify(source, root, progress(stderr=as_json), **options)
    except DataError as error:
        if report is not None:
            write_text(report, "\n".join([*refusal_lines(source.card, Root(root), error), ""]))
        raise
    if report is not None:
        write_text(report, "\n".join([*report_lines(result), ""]))
    print_result(as_json, result.to_json(), describe_verification(result), ok=result.complete)


@data.command("fake")
def fake_data(
    name: Annotated[str, typer.Argument(help="A data set by its name in 'data list'.")],
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    plugin: Plugin = None,  # noqa: ARG001
) -> None:
    """Write a tiny stand-in in the published layout: invented pictures, to try loaders and pipelines on."""
    from mergestream.data.datasets import file_source_of
    from mergestream.runtime.files import atomic_folder

    source = file_source_of(name)
    with atomic_folder(folder, lambda _: False) as scratch:
        source.write_standin(scratch)
    echo(f"A stand-in of '{name}': {folder} (invented pictures, not data)")
