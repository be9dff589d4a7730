"""`mergestream pool init`, `card` and `export`: a base without training, cards for people, folders for the hub."""

from pathlib import Path
from typing import Annotated

import typer

from mergestream.cli.pool import Expert
from mergestream.cli.shared_options import Arg, AsJson, RequireSignedBy
from mergestream.cli.terminal import print_result


def init(
    folder: Annotated[Path, typer.Argument(help="A new pool's folder; the base is written to FOLDER/base.")],
    network: Annotated[str, typer.Option(help="A timm name, 'torchvision:NAME' or 'transformers:CLASS'.")],
    classes: Annotated[str, typer.Option(help="Classes in order, as in 'benign,malignant'.")],
    weights: Annotated[
        str, typer.Option("--init", help="Initial encoder weights: pretrained (timm's), a safetensors file, or random.")
    ] = "pretrained",
    head_init: Annotated[str, typer.Option(help="Initial heads: shared, independent or zero.")] = "shared",
    arg: Arg = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make a consortium's base from a network, without training. Every site then trains from it."""
    from mergestream.pool.checkpoint_import import network_arguments
    from mergestream.training.expert_training import write_base

    names = [name.strip() for name in classes.split(",")]
    card = write_base(folder, network, network_arguments(arg or []), names, weights, head_init, seed)
    print_result(as_json, card.to_json(), [f"Base ({card.architecture}; {', '.join(card.classes)}): {folder / 'base'}"])


def card(
    expert: Expert,
    contact: Annotated[str | None, typer.Option(help="Who answers questions about this expert; no patient.")] = None,
    licence: Annotated[str | None, typer.Option(help="Licence of the weights, as in 'cc-by-nc-4.0'.")] = None,
    intended_use: Annotated[str | None, typer.Option(help="What the expert is for.")] = None,
    limits: Annotated[str | None, typer.Option(help="Where it should not be used.")] = None,
    report: Annotated[
        list[Path] | None, typer.Option(help="A site report, whose scores of this expert the card shows; repeatable.")
    ] = None,
    require_signed_by: RequireSignedBy = None,
    as_json: AsJson = False,
) -> None:
    """Write contact, licence, intended use, limits and scores at other sites into the cards. Sign it afterwards.

    README.md is written from expert.json; an old signature is removed.
    """
    from mergestream.bench.sites.site_report import scores_abroad
    from mergestream.pool.exchange.hub_folder import describe_expert
    from mergestream.pool.expert_card import read_card

    sites = scores_abroad(report, read_card(expert).weights_sha256, require_signed_by) if report else {}
    given = {"contact": contact, "licence": licence, "intended_use": intended_use, "limits": limits}
    changed = describe_expert(expert, {key: text for key, text in given.items() if text}, sites)
    print_result(as_json, changed.to_json(), [f"The card for people: {expert / 'README.md'}"])


def export(
    expert: Expert,
    hf: Annotated[Path, typer.Option(help="A new folder in Hugging Face's form, for 'huggingface-cli upload'.")],
    as_json: AsJson = False,
) -> None:
    """Write an expert as a folder for the Hugging Face hub; timm loads it with 'local-dir:' and 'hf-hub:'.

    'pool import --hf' reads it back bit by bit. Nothing is uploaded.
    """
    from mergestream.pool.exchange.hub_folder import export_hub

    exported = export_hub(expert, hf)
    print_result(as_json, exported.to_json(), [f"'{exported.name}' for the hub: {hf}"])
