"""`mergestream pool statistics`: measure what fisher, regmean and regmean_pp need."""

from typing import Annotated

import typer

from mergestream.cli import shared_options
from mergestream.cli.pool import Pool
from mergestream.cli.terminal import print_result, progress


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
    as_json: shared_options.AsJson = False,
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
