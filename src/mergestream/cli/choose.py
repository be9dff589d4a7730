"""`mergestream choose`: parse, call one function, print."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mergestream.cli.shared_options import (
    AllowMissingClasses,
    AsJson,
    DataOption,
    Device,
    Plugin,
    RequireSignedBy,
    SkipBad,
)
from mergestream.cli.terminal import print_result, progress, show


def choose(
    pool: Annotated[Path, typer.Argument(help="The pool: a folder of expert folders.")],
    parts: Annotated[list[Path] | None, typer.Argument(help="Sites' own parts or site reports, with --join.")] = None,
    dataset: Annotated[str | None, typer.Option(help="A data set by its name in 'data list'.")] = None,
    root: Annotated[Path | None, typer.Option(help="The data set's folder or zip.")] = None,
    site: Annotated[str, typer.Option(help="The site to measure as a pseudo-target, or all.")] = "all",
    out: Annotated[
        Path | None, typer.Option(help="Write the measured part to this JSON file; needed with one site.")
    ] = None,
    join: Annotated[bool, typer.Option("--join", help="Choose from the parts in these files.")] = False,
    nested: Annotated[
        bool, typer.Option("--nested", help="Also choose for pools that leave one site out, as benchmarks do.")
    ] = False,
    require_signed_by: RequireSignedBy = None,
    data_option: DataOption = None,
    skip_bad: SkipBad = 0,
    allow_missing_classes: AllowMissingClasses = False,
    jobs: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    device: Device = "auto",
    plugin: Plugin = None,  # noqa: ARG001
    as_json: AsJson = False,
) -> None:
    """Choose the method that suits a pool, on its own sites as pseudo-targets, and record it in pool.json.

    Each site's validation images are answered by the other sites' experts. A site can measure its part alone: its
    file holds numbers, no images. The method 'auto' uses the recommendation.
    """
    from mergestream.bench.choice.choice_run import (
        ALL,
        choice_table,
        describe_choice,
        measure_sites,
        recommend,
    )
    from mergestream.bench.choice.choice_run import join as join_parts
    from mergestream.bench.choice.pseudo_targets import ChoiceRequest
    from mergestream.bench.sites.site_report import read_joined
    from mergestream.data.datasets import DataRequest
    from mergestream.training.training_run import work_folder

    console = Console(stderr=as_json)
    if join != bool(parts):
        raise typer.BadParameter("Write --join and the files of the sites' parts, or neither.")
    if join == (dataset is not None):
        raise typer.BadParameter("Give --dataset to measure, or --join with files that sites have measured.")
    if site != ALL and out is None:
        raise typer.BadParameter("The part of one site goes into a file: add --out FILE.json.")
    if dataset is None:
        joined, reports = read_joined(parts or (), require_signed_by)
        evidence = join_parts(joined)
    else:
        limits = {"skip_bad": skip_bad, "allow_missing_classes": allow_missing_classes}
        data = DataRequest.parse(dataset, root, data_option, **limits)
        folder = pool.resolve()
        request = ChoiceRequest(str(folder), data, work_folder(folder), nested, device)
        evidence = measure_sites(request, site, progress(console), jobs=jobs)
        reports = []
    files = {}
    if out is not None:
        evidence.save(out)
        files["Part"] = out
    if site != ALL:
        print_result(as_json, evidence.to_json(), [f"Part of {site}: {out}"])
        return
    choice = recommend(pool, evidence, [report.evidence() for report in reports])
    if as_json:
        print_result(True, asdict(choice))
        return
    show(
        console, [choice_table(choice, evidence)], describe_choice(choice), {**files, "Recorded in": pool / "pool.json"}
    )
