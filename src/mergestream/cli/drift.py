"""`mergestream drift` and `landscape`: parse, call one function, print."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mergestream.cli import shared_options
from mergestream.cli.terminal import command_text, progress, show_result
from mergestream.runtime.errors import InputError


class DriftCommand(TyperCommand):
    """`drift`, which names the new command if it is called with the former option --landscape."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(word.split("=")[0] == "--landscape" for word in args):
            raise InputError("The landscape is a command of its own: mergestream landscape POOL --dataset …")
        return super().parse_args(ctx, args)


def drift(
    pool: Annotated[Path, typer.Argument(help="A pool's folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the numbers, figures and the page.")],
    without: Annotated[
        list[str] | None, typer.Option(help="Leave this expert out, such as a target's own; repeatable.")
    ] = None,
    as_json: shared_options.AsJson = False,
) -> None:
    """Measure how far apart a pool's experts are, layer by layer, and what averaging them loses.

    Needs no images, and reads the weights in slices, so that a pool of large networks fits in little memory.
    """
    from mergestream.bench.drift.drift_report import FIGURES, PAGE, RECORD, describe_drift, run_drift

    measured = run_drift(pool, out, progress(stderr=as_json), command_text(), without or ())
    files = {"Page": out / PAGE, "Figures": out / FIGURES, "Numbers": out / RECORD}
    show_result(as_json, measured.to_json(), [], describe_drift(measured), files)


def landscape(
    pool: Annotated[Path, typer.Argument(help="A pool's folder.")],
    dataset: shared_options.DatasetName,
    target: Annotated[
        str, typer.Option(help="The domain on whose images the loss is measured; its own expert is left out.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the numbers and figures.")],
    root: shared_options.Root = None,
    experts: Annotated[
        str | None, typer.Option(help="Three experts that span the plane, as in 'a,b,c'.", show_default="the first")
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(help="Whose merged models to draw: method/stream, as in 'entropy_adaptive/dirichlet:0.05'."),
    ] = None,
    resolution: Annotated[int, typer.Option(help="Networks along each side of the plane.")] = 21,
    images: Annotated[int, typer.Option(help="At most this many images of the target, always the same.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Images per forward pass.")] = 128,
    stream_batch_size: Annotated[int, typer.Option(help="Images per batch of the path's stream.")] = 32,
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="Measure the entropy of the answers, as if there were no labels.")
    ] = False,
    recalibrate_bn: Annotated[
        bool, typer.Option("--recalibrate-bn", help="Re-estimate BatchNorm statistics from every batch.")
    ] = False,
    data_option: shared_options.DataOption = None,
    skip_bad: shared_options.SkipBad = 0,
    allow_missing_classes: shared_options.AllowMissingClasses = False,
    device: shared_options.Device = "auto",
    plugin: shared_options.Plugin = None,  # noqa: ARG001
    as_json: shared_options.AsJson = False,
) -> None:
    """Measure the loss on a target's images over the plane through three experts, and draw it."""
    from mergestream.bench.landscape.landscape_record import describe_landscape
    from mergestream.bench.landscape.landscape_run import FIGURES, RECORD, LandscapeRequest, run_landscape
    from mergestream.data.datasets import DataRequest

    limits = {"images": images, "skip_bad": skip_bad, "allow_missing_classes": allow_missing_classes}
    request = LandscapeRequest(
        pool=str(pool),
        data=DataRequest.parse(dataset, root, data_option, **limits),
        target=target,
        experts=tuple(name.strip() for name in (experts or "").split(",") if name.strip()),
        resolution=resolution,
        batch_size=batch_size,
        use_labels=not unlabelled,
        recalibrate_bn=recalibrate_bn,
        path=path,
        stream_batch_size=stream_batch_size,
        device=device,
    )
    surface = run_landscape(request, out, progress(stderr=as_json), command=command_text())
    files = {"Figures": out / FIGURES, "Numbers": out / RECORD}
    show_result(as_json, surface.to_json(), [], describe_landscape(surface), files)
