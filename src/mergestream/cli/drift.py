"""`mergestream drift`: parse, call one function, print."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mergestream.cli.shared_options import AsJson, DataOption
from mergestream.cli.terminal import command_text, progress, show


def drift(
    pool: Annotated[Path, typer.Argument(help="A pool's folder.")],
    out: Annotated[Path, typer.Option(help="Where numbers, figures and the page go.")],
    landscape: Annotated[
        str | None, typer.Option(help="Measure the loss landscape too, on this data set by its name in 'data list'.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="The data set's folder or zip.")] = None,
    target: Annotated[
        str | None, typer.Option(help="The domain whose images the loss is of; its own expert is left out.")
    ] = None,
    experts: Annotated[
        str | None, typer.Option(help="Three experts that span the plane, as in 'a,b,c'.", show_default="the first")
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(help="Whose merged models to draw: method/stream, as in 'entropy_adaptive/dirichlet:0.05'."),
    ] = None,
    resolution: Annotated[int, typer.Option(help="Networks along each side of the plane.")] = 21,
    images: Annotated[int, typer.Option(help="At most so many images of the target, always the same.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Images a forward pass.")] = 128,
    stream_batch_size: Annotated[int, typer.Option(help="Images a batch of the path's stream.")] = 32,
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="The entropy of the answers, as where there are no labels.")
    ] = False,
    recalibrate_bn: Annotated[
        bool, typer.Option("--recalibrate-bn", help="Re-estimate BatchNorm statistics from every batch.")
    ] = False,
    data_option: DataOption = None,
    device: Annotated[str, typer.Option(help="Of the landscape: auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """How far apart a pool's experts are, layer by layer, and what averaging them loses.

    It needs no images, and reads weights a slice at a time, so that a pool of large networks fits in little memory;
    --landscape needs both: the loss on a target's images over the plane through three experts.
    """
    from mergestream.bench.drift.drift_run import FIGURES, PAGE, RECORD, run_drift
    from mergestream.bench.drift.drift_text import drift_in_words
    from mergestream.bench.landscape.landscape_run import LANDSCAPE, request_from, run_landscape
    from mergestream.bench.landscape.outcome import landscape_in_words

    console = Console(stderr=as_json)
    command = command_text()
    request = request_from(
        pool=pool,
        dataset=landscape,
        root=root,
        target=target,
        experts=experts,
        path=path,
        images=images,
        data_options=data_option or [],
        resolution=resolution,
        batch_size=batch_size,
        stream_batch_size=stream_batch_size,
        use_labels=not unlabelled,
        recalibrate_bn=recalibrate_bn,
        device=device,
    )
    found = run_drift(pool, out, progress(console), command)
    measured = request and run_landscape(request, out, progress(console), command=command)
    if as_json:
        record = found.to_json() | ({"landscape": measured.to_json()} if measured else {})
        typer.echo(json.dumps(record, indent=2, ensure_ascii=False))
        return
    files = {"Page": out / PAGE, "Figures": out / FIGURES, "Numbers": out / RECORD}
    files |= {"Landscape": out / LANDSCAPE} if measured else {}
    show(console, [], [*drift_in_words(found), *(landscape_in_words(measured) if measured else [])], files)
