"""`mergestream bench`: parse, call one function, print."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mergestream.cli import shared_options
from mergestream.cli.terminal import command_text, progress, show_result

SHOWN = 12  # warnings in the terminal; all of them are in the files
ONLY_HERE = ("init", "stages", "later", "plugin", "as_json")  # options that the function for Python lacks


def bench(
    dataset: shared_options.OptionalDatasetName = None,
    pool: Annotated[list[str] | None, typer.Option(help="A pool's folder; repeatable, for other seeds.")] = None,
    root: Annotated[
        list[str] | None, typer.Option(help="The data set's folder or zip; 'pacs=FILE' where a plan has several sets.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where runs and tables go.")] = Path("runs"),
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            "--preset",
            help="paper-table1, paper-table3, paper-fig4, paper-sweep (mu and tau), or 'results': a study on a GPU.",
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="'all', or as in 'mean, entropy_adaptive(head=shared|select, momentum=0.9)'.")
    ] = None,
    streams: Annotated[str | None, typer.Option(help="As in 'iid,dirichlet:0.05'.", show_default="iid")] = None,
    targets: Annotated[str, typer.Option(help="Domains, 'a+b' for several in one stream, 'all', or 'pairs'.")] = "all",
    seeds: Annotated[str | None, typer.Option(help="Seeds of the streams, as in '0,1,2'.", show_default="0")] = None,
    batch_size: Annotated[
        str | None, typer.Option("--batch-size", "--batch-sizes", help="Images per batch, as in '32' or '1,8,32'.")
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="lodo: leave each domain out; ood: all experts on the set's outside test sets.")
    ] = "lodo",
    data_option: shared_options.DataOption = None,
    images: Annotated[int | None, typer.Option(help="At most this many images per target, always the same.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="The method that others are compared with.", show_default="entropy_adaptive")
    ] = None,
    skip_bad: shared_options.SkipBad = 0,
    allow_missing_classes: shared_options.AllowMissingClasses = False,
    allow_seen: Annotated[bool, typer.Option("--allow-seen", help="Keep experts trained on the target.")] = False,
    loud_heads: Annotated[
        str, typer.Option(help="Factors of the first expert's head, as in '1,100': a hostile or badly scaled expert.")
    ] = "1",
    timed: Annotated[bool, typer.Option("--timed", help="Share no logits, so that milliseconds are real.")] = False,
    init: Annotated[str, typer.Option(help="First weights of the encoders that the plan 'results' trains.")] = "random",
    stages: Annotated[
        str | None, typer.Option(help="Stages of the plan 'results', as in 'main-pacs,hostile'.", show_default="all")
    ] = None,
    later: Annotated[
        bool, typer.Option("--later", help="Mark the record of 'results': its rule has met these data before.")
    ] = False,
    jobs: shared_options.Jobs = None,
    engine: shared_options.Engine = "local",
    device: shared_options.Device = "auto",
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16, float16 or auto.")] = "float32",
    plugin: shared_options.Plugin = None,
    as_json: shared_options.AsJson = False,
) -> None:
    """Compare methods: leave each domain out, stream it through every method, and print tables with intervals.

    All methods see the same batches. What is done already under --out is not done again, also after a kill.
    """
    options = dict(locals())  # named as in the function for Python
    from mergestream.bench.analysis.duels import describe_duels
    from mergestream.bench.python_calls import bench as compare
    from mergestream.bench.report.bench_tables import terminal_tables
    from mergestream.bench.study.results_plan import STUDIES
    from mergestream.bench.study.study_run import run_study, study_request
    from mergestream.runtime.parallel import default_workers

    workers = jobs if jobs is not None else default_workers(device)
    if plan in STUDIES:
        study = study_request(plan, out, root or [], init=init, stages=stages, device=device, jobs=workers, later=later)
        record = run_study(study, progress(stderr=as_json), command_text())
        files = {"Tables": out / "results.md", "Record": record}
        show_result(as_json, json.loads(record.read_text(encoding="utf-8")), [], [], files)
        return
    if dataset is None or not pool:
        raise typer.BadParameter("A benchmark of your own needs --dataset and --pool; --plan results has its own.")
    own = {name: value for name, value in options.items() if name not in ONLY_HERE}
    own |= {"root": root[0] if root else None, "jobs": workers}
    findings = compare(**own, track=progress(stderr=as_json), command=command_text())
    warnings = [f"Warning: {sentence}" for sentence in findings.sentences]
    rest = [f"{len(warnings) - SHOWN} more warnings: {out / 'results.md'}"] if len(warnings) > SHOWN else []
    files = {"Tables": out / "results.md", "LaTeX": out / "results.tex", "Every run": out / "results.csv"}
    files["Records"] = out / "runs"
    sentences = [*describe_duels(findings.duels), *warnings[:SHOWN], *rest]
    show_result(as_json, findings.to_json(), terminal_tables(findings), sentences, files)
