"""`mergestream reproduce`: parse, call one function, print."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mergestream.cli.shared_options import Arg, Device, Engine, Jobs
from mergestream.cli.terminal import command_text, echo, progress, show


def reproduce(
    out: Annotated[Path, typer.Option(help="Folder for pools, runs, tables, figures and the page.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder with one folder or zip per data set, as in DATA/pacs, DATA/midog.zip.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="table1 (with table2), table3, sweep, fig2, fig3, fig4, fig5, cost.", show_default="all of them"
        ),
    ] = None,
    backbones: Annotated[
        str | None, typer.Option(help="timm names.", show_default="vit_base_patch32_224,vit_base_patch16_224")
    ] = None,
    sets: Annotated[str | None, typer.Option(help="Data sets, as in 'pacs,midog'.", show_default="all nine")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Rehearse on invented pictures, with both backbones in miniature.")
    ] = False,
    init: Annotated[
        str | None,
        typer.Option(
            help="First weights of the encoders: pretrained, a safetensors file, or random; or BACKBONE=FILE,… each.",
            show_default="pretrained",
        ),
    ] = None,
    arg: Arg = None,
    settings: Annotated[
        str | None, typer.Option(help="Recipes to try at every site, as in 'train'.", show_default="the paper's sweep")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps per fit.", show_default="5000")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Training seeds, one pool each, as in '0,1,2'.", show_default="0")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look for the data sets, estimate the hours, and stop.")
    ] = False,
    jobs: Jobs = None,
    engine: Engine = "local",
    device: Device = "auto",
) -> None:
    """Reproduce the paper: train the experts, run every table and figure, and print the paper's numbers beside ours.

    Finished work is not repeated, also after a kill.
    """
    from mergestream.bench.report.result_table import in_parts
    from mergestream.bench.reproduction.dataset_search import describe_places
    from mergestream.bench.reproduction.hours import describe_hours, estimate_hours
    from mergestream.bench.reproduction.reproduction_page import INVENTED
    from mergestream.bench.reproduction.reproduction_plan import request_from
    from mergestream.bench.reproduction.reproduction_run import PAGE, RECORD, TABLES_FOLDER, run_reproduction
    from mergestream.bench.reproduction.reproduction_tables import dataset_tables, summary
    from mergestream.runtime.parallel import default_workers

    request = request_from(
        data=data,
        out=out,
        only=only,
        backbones=backbones,
        sets=sets,
        seeds=seeds,
        smoke=smoke,
        init=init or ("random" if smoke else "pretrained"),
        arguments=tuple(arg or ()),
        settings=settings,
        steps=steps,
        device=device,
        jobs=jobs if jobs is not None else default_workers(device),
        engine=engine,
    )
    echo(*describe_places(list(request.places)), *([INVENTED] if smoke else []))
    if request.usable:
        echo(*describe_hours(estimate_hours(request), request))
    if dry_run:
        return
    record = run_reproduction(request, progress(), command_text())
    files = {"Page": out / PAGE, "Tables": out / TABLES_FOLDER, "Record": out / RECORD}
    show([part for t in dataset_tables(record) for part in in_parts(t, Console().width)], summary(record), files)
