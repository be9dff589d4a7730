"""`mergestream pool init`, `card`, `export`, `statistics`, `key`, `sign`, `remove` and `revoke`: what sites do."""

from pathlib import Path
from typing import Annotated

import typer

from mergestream.cli import shared_options
from mergestream.cli.pool import Expert, Pool
from mergestream.cli.shared_options import Arg, AsJson, RequireSignedBy
from mergestream.cli.terminal import echo, print_result, progress

Key = Annotated[Path, typer.Option(help="The site's private key (PEM, elliptic curve), made by 'pool key' or openssl.")]
Certificate = Annotated[Path | None, typer.Option(help="The key's certificate (PEM), where an authority issued one.")]
Chain = Annotated[list[Path] | None, typer.Option(help="A certificate between that one and the authority; repeatable.")]


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


def statistics(
    folder: Pool,
    dataset: shared_options.DatasetName,
    root: shared_options.Root = None,
    gram: Annotated[int, typer.Option(help="Images per expert for regmean; 0 measures none.")] = 0,
    fisher: Annotated[
        int, typer.Option(help="Images per expert for fisher(fisher=mergelm), FusionBench's form and the paper's row.")
    ] = 0,
    fisher_exact: Annotated[
        int, typer.Option(help="Images per expert for fisher(fisher=exact): one gradient per class and image.")
    ] = 0,
    gram_pp: Annotated[int, typer.Option(help="Images per expert for regmean_pp.")] = 0,
    leave_out: Annotated[
        list[str] | None,
        typer.Option(
            help="Pools of --gram-pp: without this domain ('a+b': without both), 'all' or 'none'; repeatable.",
            show_default="all: every pool that lacks one domain",
        ),
    ] = None,
    expert: Annotated[
        list[str] | None, typer.Option(help="Only this expert, but for --gram-pp; repeatable.", show_default="all")
    ] = None,
    data_option: shared_options.DataOption = None,
    skip_bad: shared_options.SkipBad = 0,
    allow_missing_classes: shared_options.AllowMissingClasses = False,
    device: shared_options.Device = "auto",
    plugin: shared_options.Plugin = None,  # noqa: ARG001
    as_json: AsJson = False,
) -> None:
    """Measure every expert on its own domain's training images and store the result in its folder.

    Without counts: the paper's, --gram 1600 --fisher 500 --gram-pp 1600. What is there already is kept.
    """
    from mergestream.data.datasets import DataRequest
    from mergestream.training.pool_statistics import EACH, PAPER_IMAGES, describe_counts, measure_pool
    from mergestream.training.training_run import work_folder

    given = {"gram": gram, "fisher_mergelm": fisher, "fisher_exact": fisher_exact, "gram_pp": gram_pp}
    counts = measure_pool(
        folder,
        DataRequest.parse(dataset, root, data_option, skip_bad=skip_bad, allow_missing_classes=allow_missing_classes),
        work_folder(folder.resolve()),
        {kind: count for kind, count in given.items() if count} or PAPER_IMAGES,
        device,
        experts=expert or (),
        leave_out=leave_out or (EACH,),
        track=progress(stderr=True),
    )
    print_result(as_json, counts, list(describe_counts(counts)))


def make_key(file: Annotated[Path, typer.Argument(help="A new file; the public half is written to FILE.pub.")]) -> None:
    """Make the key pair that signs a site's experts (P-256). Nothing is overwritten."""
    from mergestream.pool.trust.signatures import create_signing_key

    echo(*map(str, create_signing_key(file)))


def sign(
    expert: Annotated[Path, typer.Argument(help="The folder of an expert, a base or a merged model.")],
    key: Key,
    certificate: Certificate = None,
    chain: Chain = None,
) -> None:
    """Sign every file of an expert's folder: weights, card, statistics, README.md. Writes model.sig beside them."""
    from mergestream.pool.trust.signatures import sign_expert

    echo(f"Signed: {sign_expert(expert, key, certificate, chain or ())}")


def remove(
    folder: Pool, expert: Annotated[str, typer.Argument(help="The expert's name in the pool.")], as_json: AsJson = False
) -> None:
    """Take an expert out of the pool. It is kept as a version."""
    from mergestream.pool.exchange.changes import remove_expert

    version = remove_expert(folder, expert)
    lines = [f"'{expert}' is no longer in the pool; it is kept as version {version}."]
    print_result(as_json, {"expert": expert, "kept_version": version}, lines)


def revoke(
    folder: Pool,
    expert: Annotated[str, typer.Argument(help="The expert's name in the pool.")],
    key: Key,
    reason: Annotated[str, typer.Option(help="Why, in one sentence; it is shown to all sites.")],
    certificate: Certificate = None,
    chain: Chain = None,
    require_signed_by: RequireSignedBy = None,
    as_json: AsJson = False,
) -> None:
    """Write an expert into the pool's signed list of revocations, revoked.json. Services stop using it."""
    from mergestream.pool.trust.revocations import revoke_expert

    revocations = revoke_expert(
        folder,
        expert,
        key=key,
        reason=reason,
        certificate=certificate,
        chain=chain or (),
        require_signed_by=require_signed_by,
    )
    line = (
        f"'{expert}' is revoked, in version {revocations.version} of the list. Send revoked.json and revoked.json.sig."
    )
    print_result(as_json, revocations.to_json(), [line])
