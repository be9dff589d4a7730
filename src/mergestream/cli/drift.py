"""`mergestream drift`: parse, call one function, print."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mergestream.cli.shared_options import AsJson, DataOption
from mergestream.cli.terminal import command_text, print_result, progress, show


def drift(
    pool: Annotated[Path, typer.Argument(help="A pool's folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the numbers, figures and the page.")],
    landscape: Annotated[
        str | None, typer.Option(help="Also measure the loss landscape, on this data set (a name from 'data list').")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="The data set's folder or zip.")] = None,
    target: Annotated[
        str | None, typer.Option(help="The domain on whose images the loss is measured; its own expert is left out.")
    ] = None,
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
    data_option: DataOption = None,
    device: Annotated[str, typer.Option(help="Device of the landscape: auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure how far apart a pool's experts are, layer by layer, and what averaging them loses.

    Needs no images, and reads the weights in slices, so that a pool of large networks fits in little memory.
    --landscape needs both: it measures the loss on a target's images over the plane through three experts.
    """
    from mergestream.bench.drift.drift_report import FIGURES, PAGE, RECORD, describe_drift, run_drift
    from mergestream.bench.landscape.landscape_record import describe_landscape
    from mergestream.bench.landscape.landscape_run import RECORD as LANDSCAPE
    from mergestream.bench.landscape.landscape_run import LandscapeRequest, run_landscape
    from mergestream.data.datasets import DataRequest
    from mergestream.runtime.errors import InputError
    from mergestream.runtime.option_checks import parse_options

    console = Console(stderr=as_json)
    command = command_text()
    if landscape is None and any(option is not None for option in (root, target, experts, path)):
        raise InputError("--root, --target, --experts and --path belong to a landscape: add --landscape DATASET.")
    request = landscape and LandscapeRequest(
        pool=str(pool),
        data=DataRequest(landscape, None if root is None else str(root), parse_options(data_option or []), images),
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
    measured = run_drift(pool, out, progress(console), command)
    surface = run_landscape(request, out, progress(console), command=command) if request else None
    if as_json:
        record = measured.to_json() | ({"landscape": surface.to_json()} if surface else {})
        print_result(True, record)
        return
    files = {"Page": out / PAGE, "Figures": out / FIGURES, "Numbers": out / RECORD}
    files |= {"Landscape": out / LANDSCAPE} if surface else {}
    show(console, [], [*describe_drift(measured), *(describe_landscape(surface) if surface else [])], files)
