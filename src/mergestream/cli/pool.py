"""`mergestream pool`: list, change, verify, import and merge experts."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergestream.cli.shared_options import AsJson
from mergestream.cli.terminal import echo, print_result

if TYPE_CHECKING:
    from mergestream.pool.exchange.changes import AcceptedExpert

pool = typer.Typer(help="Share, update and inspect the experts of a consortium's pool.", no_args_is_help=True)

Pool = Annotated[Path, typer.Argument(help="The pool: a folder of expert folders, and base/ if there is one.")]
Expert = Annotated[Path, typer.Argument(help="The site's folder with weights.safetensors and expert.json.")]
Name = Annotated[
    str | None, typer.Option(help="The expert's name in the pool.", show_default="the name in its expert.json")
]
AllowOtherBase = Annotated[
    bool, typer.Option("--allow-other-base", help="Accept an expert trained from a different base checkpoint.")
]


@pool.command("list")
def list_experts(folder: Pool, as_json: AsJson = False) -> None:
    """List the experts in order: domain, accuracy on their own validation images, temperature, versions, hash."""
    from mergestream.pool.exchange.pool_inspection import list_pool, listing_lines

    listing = list_pool(folder)
    print_result(as_json, listing, listing_lines(folder, listing))


@pool.command("add")
def add(
    folder: Pool, expert: Expert, name: Name = None, allow_other_base: AllowOtherBase = False, as_json: AsJson = False
) -> None:
    """Check a site's expert and add it to the pool, as the last one.

    Its hash, classes, network, preprocessing, base and weights must fit. Warns of an overconfident expert.
    """
    from mergestream.pool.exchange.changes import add_expert

    accepted = add_expert(folder, expert, name=name, allow_other_base=allow_other_base)
    _print_accepted(as_json, accepted, "is in the pool")


@pool.command("replace")
def replace(
    folder: Pool, expert: Expert, name: Name = None, allow_other_base: AllowOtherBase = False, as_json: AsJson = False
) -> None:
    """Replace a site's expert with a newer one, after the same checks. The old version is kept."""
    from mergestream.pool.exchange.changes import replace_expert

    accepted = replace_expert(folder, expert, name=name, allow_other_base=allow_other_base)
    _print_accepted(as_json, accepted, "was replaced")


@pool.command("restore")
def restore(
    folder: Pool,
    expert: Annotated[str, typer.Argument(help="The expert's name in the pool.")],
    version: Annotated[int, typer.Argument(help="A number under 'kept' in 'pool list'.")],
    as_json: AsJson = False,
) -> None:
    """Restore an earlier version of an expert. The current version is kept too."""
    from mergestream.pool.exchange.changes import restore_expert

    _print_accepted(as_json, restore_expert(folder, expert, version), f"is as in version {version} again")


@pool.command("verify")
def verify(folder: Pool, as_json: AsJson = False) -> None:
    """Check the whole pool, its candidates and earlier versions. Exit code 1 if anything is wrong."""
    from mergestream.pool.exchange.pool_inspection import verify_pool

    result = verify_pool(folder)
    print_result(as_json, result.to_json(), result.lines(), ok=result.sound)


@pool.command("import")
def import_checkpoint(
    out: Annotated[Path, typer.Argument(help="A new folder, named as the expert: OUT/NAME.")],
    file: Annotated[Path, typer.Argument(help="A .safetensors or PyTorch file, or a Hugging Face folder.")],
    network: Annotated[
        str,
        typer.Option(help="A timm name, or torchvision:NAME, transformers:CLASS, monai:CLASS."),
    ],
    classes: Annotated[str, typer.Option(help="Classes in the order of the head's rows, as in 'benign,malignant'.")],
    domain: Annotated[str | None, typer.Option(help="The domain of its training data.")] = None,
    head: Annotated[
        str | None, typer.Option(help="The head's module, as in 'fc'.", show_default="found by the network's library")
    ] = None,
    arg: Annotated[
        list[str] | None, typer.Option(help="An argument of the network, as in 'img_size=126'; repeatable.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Ignore tensors whose names start so, as in 'criterion'; repeatable."),
    ] = None,
    size: Annotated[int | None, typer.Option(help="Height and width in pixels.", show_default="the network's")] = None,
    mean: Annotated[str | None, typer.Option(help="Mean per channel, as in '0.5,0.5,0.5'.")] = None,
    std: Annotated[str | None, typer.Option(help="Standard deviation per channel.")] = None,
    interpolation: Annotated[str | None, typer.Option(help="How images are resized, as in 'bicubic'.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make an expert folder from a checkpoint of timm, torchvision, Hugging Face, MONAI or a plain state dict.

    Nothing is downloaded, and no code in the file runs. Missing and unexpected tensors are refused by name.
    """
    from mergestream.pool.checkpoint_import import import_expert, network_arguments, pixel_options

    card = import_expert(
        out,
        file,
        network=network,
        classes=[name.strip() for name in classes.split(",")],
        domain=domain,
        head=head,
        arguments=network_arguments(arg or []),
        pixels=pixel_options(size, mean, std, interpolation),
        ignore=ignore or [],
    )
    lines = [f"Expert '{card.name}' ({card.architecture}; {', '.join(card.classes)}): {out}"]
    if card.preprocessing is None:
        lines.append("Its preprocessing is unknown, so it takes preprocessed floats only; give --size to set it.")
    print_result(as_json, card.to_json(), lines)


@pool.command("merge")
def merge(
    folder: Pool,
    out: Annotated[Path, typer.Argument(help="A new folder, named as the merged model.")],
    encoder: Annotated[
        str | None, typer.Option(help="A coefficient per expert, in the pool's order, as in '0.5,0.3,0.2'.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="Coefficients of the head.", show_default="the encoder's")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Or a method that needs no batch: mean, task_arithmetic, ties, fisher, regmean."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one merged model as an expert folder; its card names the merged experts."""
    from mergestream.methods.merged_expert import merge_pool
    from mergestream.runtime.option_checks import parse_numbers

    card = merge_pool(
        folder,
        out,
        encoder=parse_numbers("--encoder", encoder),
        head=parse_numbers("--head", head),
        method=method,
    )
    parts = ", ".join(part["name"] for part in card.recipe["merged_from"])
    print_result(as_json, card.to_json(), [f"'{card.name}', merged from {parts}: {out}"])


def _print_accepted(as_json: bool, accepted: "AcceptedExpert", what: str) -> None:
    for warning in () if as_json else accepted.warnings:
        echo(f"Warning: {warning}", err=True)
    line = f"'{accepted.expert}' {what}: version {accepted.version}, {accepted.weights_sha256[:12]}"
    print_result(as_json, asdict(accepted), [line])
