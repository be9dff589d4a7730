"""`mergestream choose`: parse, call one function, print."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mergestream.cli import shared_options
from mergestream.cli.terminal import print_result, progress, show_result


def choose(
    pool: Annotated[Path, typer.Argument(help="The pool: a folder of expert folders.")],
    parts: Annotated[list[Path] | None, typer.Argument(help="Sites' own parts or site reports, with --join.")] = None,
    dataset: shared_options.OptionalDatasetName = None,
    root: shared_options.Root = None,
    site: Annotated[str, typer.Option(help="The site to measure as a pseudo-target, or all.")] = "all",
    out: Annotated[
        Path | None, typer.Option(help="Write the measured part to this JSON file; needed with one site.")
    ] = None,
    join: Annotated[bool, typer.Option("--join", help="Choose from the parts in these files.")] = False,
    nested: shared_options.Nested = False,
    require_signed_by: shared_options.RequireSignedBy = None,
    data_option: shared_options.DataOption = None,
    skip_bad: shared_options.SkipBad = 0,
    allow_missing_classes: shared_options.AllowMissingClasses = False,
    jobs: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    device: shared_options.Device = "auto",
    plugin: shared_options.Plugin = None,  # noqa: ARG001
    as_json: shared_options.AsJson = False,
) -> None:
    """Choose the method that suits a pool, on its own sites as pseudo-targets, and record it in pool.json.

    Each site's validation images are answered by the other sites' experts. A site can measure its part alone: its
    file holds numbers, no images. The method 'auto' uses the recommendation.
    """
    from mergestream.bench.choice.choice_run import choice_table, describe_choice, run_choice
    from mergestream.data.datasets import DataRequest

    if join != bool(parts):
        raise typer.BadParameter("Write --join and the files of the sites' parts, or neither.")
    limits = {"skip_bad": skip_bad, "allow_missing_classes": allow_missing_classes}
    evidence, choice = run_choice(
        pool,
        None if dataset is None else DataRequest.parse(dataset, root, data_option, **limits),
        parts or (),
        site=site,
        out=out,
        nested=nested,
        require_signed_by=require_signed_by,
        device=device,
        jobs=jobs,
        track=progress(stderr=as_json),
    )
    if choice is None:
        print_result(as_json, evidence.to_json(), [f"Part of {site}: {out}"])
        return
    files = {"Part": out} if out else {}
    tables, sentences = [choice_table(choice, evidence)], describe_choice(choice)
    show_result(as_json, asdict(choice), tables, sentences, {**files, "Recorded in": pool / "pool.json"})
