"""`mergestream data`: list, verify and imitate data sets."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mergestream.cli.shared_options import AsJson, DataOption, Plugin
from mergestream.cli.terminal import echo, print_result, progress

if TYPE_CHECKING:
    from mergestream.data.datasets.dataset_sources import DataVerification

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
    from mergestream.data.datasets.verification_report import report_lines
    from mergestream.runtime.files import write_text
    from mergestream.runtime.option_checks import parse_options

    options = dict(parse_options(data_option or []))
    result = verify(file_source_of(name), root, progress(Console(stderr=as_json)), **options)
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


def describe_verification(verification: "DataVerification") -> list[str]:
    """Every domain's images by class, differences from the published counts, and the verdict last."""
    from mergestream.runtime.errors import some

    lines = [f"{verification.index.card.name} in {verification.location}"]
    for domain, counts in verification.index.counts().items():
        published = verification.published.get(domain)
        beside = "" if published is None else f" (published: {published:,})"
        classes = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        lines.append(f"  {domain}: {sum(counts.values()):,} images{beside}: {classes}")
    lines.append(f"{verification.usable:,} usable of {verification.index.images_found:,} images.")
    reasons: dict[str, list[str]] = {}
    for each in verification.index.left_out:
        reasons.setdefault(each.why, []).append(each.what)
    lines += [f"Left out or corrected: {some(what, 3)}: {why}." for why, what in reasons.items()]
    if verification.index.missing:
        lines.append(f"Missing, {len(verification.index.missing):,}: {some(verification.index.missing)}.")
    if verification.unreadable:
        lines.append(f"Unreadable, {len(verification.unreadable):,}: {some(verification.unreadable)}.")
    lines += [f"{d}: {here:,} images, published {there:,}." for d, (here, there) in verification.differing.items()]
    lines += [f"{domain} has no image of {some(names)}." for domain, names in verification.lacking.items()]
    if verification.index.total is not None and verification.index.total != verification.usable:
        lines.append(f"{verification.usable:,} usable images in all, published {verification.index.total:,}.")
    if verification.index.card.overlap:
        lines.append(verification.index.card.overlap)
    if not verification.complete:
        return [*lines, "NOT complete."]
    agree = ": every image can be read, and the counts are the published ones (pixels are not compared)"
    unknown = " as far as can be told: every image can be read; no counts are published to compare with"
    return [*lines, f"Complete{agree if verification.published or verification.index.total else unknown}."]
