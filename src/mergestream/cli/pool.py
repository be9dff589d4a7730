"""`mergestream pool`: list, change, verify, import and merge experts."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergestream.cli.shared_options import Arg, AsJson, Plugin, RequireSignedBy
from mergestream.cli.terminal import echo, print_result
from mergestream.runtime.errors import InputError

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
    folder: Pool,
    expert: Expert,
    name: Name = None,
    allow_other_base: AllowOtherBase = False,
    require_signed_by: RequireSignedBy = None,
    as_json: AsJson = False,
) -> None:
    """Check a site's expert and add it to the pool, as the last one.

    Its hash, classes, network, preprocessing, base and weights must fit. Warns of an overconfident expert.
    """
    from mergestream.pool.exchange.changes import add_expert

    accepted = add_expert(
        folder, expert, name=name, allow_other_base=allow_other_base, require_signed_by=require_signed_by
    )
    _print_accepted(as_json, accepted, "is in the pool")


@pool.command("replace")
def replace(
    folder: Pool,
    expert: Expert,
    name: Name = None,
    allow_other_base: AllowOtherBase = False,
    require_signed_by: RequireSignedBy = None,
    as_json: AsJson = False,
) -> None:
    """Replace a site's expert with a newer one, after the same checks. The old version is kept."""
    from mergestream.pool.exchange.changes import replace_expert

    accepted = replace_expert(
        folder, expert, name=name, allow_other_base=allow_other_base, require_signed_by=require_signed_by
    )
    _print_accepted(as_json, accepted, "was replaced")


@pool.command("restore")
def restore(
    folder: Pool,
    expert: Annotated[str, typer.Argument(help="The expert's name in the pool.")],
    version: Annotated[int, typer.Argument(help="A number under 'kept' in 'pool list'.")],
    require_signed_by: RequireSignedBy = None,
    as_json: AsJson = False,
) -> None:
    """Restore an earlier version of an expert. The current version is kept too."""
    from mergestream.pool.exchange.changes import restore_expert

    accepted = restore_expert(folder, expert, version, require_signed_by=require_signed_by)
    _print_accepted(as_json, accepted, f"is as in version {version} again")


@pool.command("verify")
def verify(folder: Pool, require_signed_by: RequireSignedBy = None, as_json: AsJson = False) -> None:
    """Check the whole pool, its candidates and earlier versions. Exit code 1 if anything is wrong."""
    from mergestream.pool.exchange.pool_inspection import verify_pool

    result = verify_pool(folder, require_signed_by)
    print_result(as_json, result.to_json(), result.lines(), ok=result.sound)


@pool.command("import")
def import_checkpoint(
    file: Annotated[Path, typer.Argument(help="A .safetensors or PyTorch file, or a Hugging Face folder.")],
    out: Annotated[Path, typer.Argument(help="A new folder, named as the expert: OUT/NAME.")],
    network: Annotated[
        str | None, typer.Option(help="A timm name, or torchvision:NAME, transformers:CLASS, monai:CLASS.")
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="Classes in the order of the head's rows, as in 'benign,malignant'.")
    ] = None,
    hf: Annotated[
        bool, typer.Option("--hf", help="FILE is a folder of 'pool export': read the whole expert back.")
    ] = False,
    domain: Annotated[str | None, typer.Option(help="The domain of its training data.")] = None,
    head: Annotated[
        str | None, typer.Option(help="The head's module, as in 'fc'.", show_default="found by the network's library")
    ] = None,
    arg: Arg = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Ignore tensors whose names start so, as in 'criterion'; repeatable.")
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
    from mergestream.pool.exchange.hub_folder import import_hub

    if out.is_file() and not file.exists():
        raise InputError(f"The checkpoint comes first: mergestream pool import {out} {file} …")
    if hf:
        card = import_hub(file, out)
        print_result(as_json, card.to_json(), [f"Expert '{card.name}', as it was exported: {out}"])
        return
    if network is None or classes is None:
        raise typer.BadParameter("Give --network and --classes, or --hf for a folder of 'pool export'.")
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


@pool.command("concepts")
def set_class_concepts(
    expert: Expert,
    file: Annotated[Path, typer.Argument(help="A YAML file: a code (value, scheme, meaning) per class.")],
    as_json: AsJson = False,
) -> None:
    """Write codes of the classes (SNOMED CT, RadLex) into an expert's card, for DICOM reports. Sign it afterwards."""
    from mergestream.pool.class_concepts import set_concepts

    card = set_concepts(expert, file)
    lines = [
        f"{name}: {code['scheme']} {code['value']} ({code['meaning']})" for name, code in card.class_concepts.items()
    ]
    print_result(as_json, card.to_json(), [f"The card of '{card.name}' has codes for its classes:", *lines])


@pool.command("merge")
def merge(
    folder: Pool,
    out: Annotated[Path, typer.Argument(help="A new folder, named as the merged model.")],
    encoder: Annotated[
        str | None, typer.Option(help="A coefficient per expert, in the pool's order, as in '0.5,0.3,0.2'.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="Coefficients of the head.", show_default="the encoder's")] = None,
    method: Annotated[
        str | None, typer.Option(help="Or a method that needs no batch: mean, task_arithmetic, ties, fisher, regmean.")
    ] = None,
    plugin: Plugin = None,  # noqa: ARG001
    as_json: AsJson = False,
) -> None:
    """Write one merged model as an expert folder; its card names the merged experts."""
    from mergestream.methods.merged_expert import merge_pool
    from mergestream.runtime.option_checks import parse_numbers

    card = merge_pool(
        folder, out, encoder=parse_numbers("--encoder", encoder), head=parse_numbers("--head", head), method=method
    )
    parts = ", ".join(part["name"] for part in card.recipe["merged_from"])
    print_result(as_json, card.to_json(), [f"'{card.name}', merged from {parts}: {out}"])


def _print_accepted(as_json: bool, accepted: "AcceptedExpert", what: str) -> None:
    for warning in () if as_json else accepted.warnings:
        echo(f"Warning: {warning}", err=True)
    signed = f"signed by {accepted.signed_by}" if accepted.signed_by else "signature not checked (--require-signed-by)"
    line = f"'{accepted.expert}' {what}: version {accepted.version}, {accepted.weights_sha256[:12]}, {signed}"
    print_result(as_json, asdict(accepted), [line])
