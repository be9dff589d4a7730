"""The command line: parse, call one function, print."""

import json
import logging
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mergestream import __version__
from mergestream.cli.audit import audit as audit_commands
from mergestream.cli.drift import drift
from mergestream.cli.pool import pool as pool_commands
from mergestream.cli.report import report
from mergestream.cli.serve import serve, serve_token
from mergestream.cli.terminal import progress, show
from mergestream.cli.train import train
from mergestream.runtime.errors import MergestreamError

app = typer.Typer(
    name="mergestream",
    help="Many hospitals' models in, one model per batch out: online, label-free, forward passes only.",
    epilog="For research. Not a medical device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


INTERRUPTED = 130
SHOWN = 12  # warnings in the terminal; all of them are in the files


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mergestream {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error, and log details.")] = False,
) -> None:
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(name)s: %(message)s")


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Where to write all of it.", show_default="demo, or demo-quick with --quick")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller version that takes about a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")] = False,
) -> None:
    """The whole story on the embedded phantom hospitals: train experts, leave each hospital out, compare methods.

    The data are synthetic. What is done already under --out is not done again.
    """
    from mergestream.bench.analysis.comparison import in_words
    from mergestream.bench.demo.demo import Plan, run_demo
    from mergestream.bench.demo.demo_tables import DIFFERENCES, SYNTHETIC, main_tables
    from mergestream.bench.report.page import NOTICE

    out = out or Path("demo-quick" if quick else "demo")
    console = Console(stderr=as_json)
    console.print(f"{SYNTHETIC} {NOTICE}", soft_wrap=True)
    command = f"mergestream demo --out {out}" + (" --quick" if quick else "")
    findings = run_demo(out, Plan.quick() if quick else Plan.full(), progress(console), command)
    if as_json:
        typer.echo((out / "results.json").read_text(encoding="utf-8"))
        return
    files = {"Report": out / "report.html", "Numbers": out / "results.json", "Records": out / "runs"}
    show(console, main_tables(findings, compact=True), [*in_words(findings.duels), DIFFERENCES], files)


data = typer.Typer(help="Data sets: what is supported, is mine complete, write a tiny stand-in.", no_args_is_help=True)
app.add_typer(data, name="data")
app.add_typer(pool_commands, name="pool")
app.add_typer(audit_commands, name="audit")

AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")]


@data.command("list")
def list_data(as_json: AsJson = False) -> None:
    """Every data set: what it shows, its domains and classes, its licence and where to get it."""
    from mergestream.bench.report.data_text import card_in_words
    from mergestream.data.datasets import DATASETS

    cards = [source.about for source in DATASETS.values()]
    if as_json:
        typer.echo(json.dumps([card.to_json() for card in cards], indent=2, ensure_ascii=False))
        return
    for card in cards:
        typer.echo("\n".join(card_in_words(card)) + "\n")


@data.command("verify")
def verify_data(
    name: Annotated[str, typer.Argument(help="A data set by its name in 'data list'.")],
    root: Annotated[Path, typer.Argument(help="Its folder or zip.")],
    data_option: Annotated[
        list[str] | None, typer.Option(help="An option of the data set, as in 'csv=samples.csv'.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Is this copy complete? Reads every image. Exit code 1 if something is missing or differs."""
    from mergestream.bench.report.data_text import verification_in_words
    from mergestream.data.datasets import file_source_of
    from mergestream.data.datasets.verification import verify
    from mergestream.runtime.option_text import parse_options

    console = Console(stderr=as_json)
    options = dict(parse_options(data_option or []))
    found = verify(file_source_of(name), root, progress(console), **options)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        for sentence in verification_in_words(found):
            console.print(sentence, highlight=False, soft_wrap=True, markup=False)
    if not found.complete:
        raise typer.Exit(1)


@data.command("fake")
def fake_data(
    name: Annotated[str, typer.Argument(help="A data set by its name in 'data list'.")],
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
) -> None:
    """Write a tiny stand-in in exactly the published layout: invented pictures, to try loaders and pipelines on."""
    from mergestream.data.datasets import file_source_of
    from mergestream.runtime.files import folder_written_whole

    source = file_source_of(name)
    with folder_written_whole(folder, lambda _: False) as scratch:
        source.write_standin(scratch)
    typer.echo(f"A stand-in of '{name}': {folder} (invented pictures, not data)")


@app.command()
def bench(
    dataset: Annotated[str, typer.Option(help="A data set by its name in 'data list'.")],
    pool: Annotated[list[str], typer.Option(help="A pool's folder; again for pools of other training seeds.")],
    root: Annotated[Path | None, typer.Option(help="The data set's folder or zip.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs and tables go.")] = Path("runs"),
    methods: Annotated[
        str | None,
        typer.Option(
            help="'all', or methods with options: 'mean, entropy_adaptive(head=shared|select, momentum=0.9)'."
        ),
    ] = None,
    streams: Annotated[
        str | None, typer.Option(help="Streams, as in 'iid,dirichlet:0.05'.", show_default="iid")
    ] = None,
    targets: Annotated[
        str, typer.Option(help="Domains, 'a+b' for several streamed together, 'all', or 'pairs'.")
    ] = "all",
    seeds: Annotated[str | None, typer.Option(help="Seeds of the streams, as in '0,1,2'.", show_default="0")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images a batch.", show_default="32")] = None,
    protocol: Annotated[
        str, typer.Option(help="lodo: leave each domain out; ood: all experts on the set's outside test sets.")
    ] = "lodo",
    preset: Annotated[
        str | None, typer.Option(help="What the paper ran: paper-table1, paper-table2, paper-table3, paper-fig4.")
    ] = None,
    data_option: Annotated[
        list[str] | None, typer.Option(help="An option of the data set, as in 'part=test' or 'domain=scanner'.")
    ] = None,
    images: Annotated[int | None, typer.Option(help="At most so many images of each target, always the same.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="The method that others are compared with.", show_default="entropy_adaptive")
    ] = None,
    skip_bad: Annotated[int, typer.Option(help="So many missing or unreadable images may be left out.")] = 0,
    allow_missing_classes: Annotated[
        bool, typer.Option("--allow-missing-classes", help="A domain may lack a class.")
    ] = False,
    allow_seen: Annotated[
        bool, typer.Option("--allow-seen", help="Keep experts that were trained on the target.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(help="Processes on this machine.", show_default="one a core; one on a GPU")
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray: a cluster that sees the same paths.")] = "local",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare methods: leave each domain out, stream it through every method, and print tables with intervals.

    All methods see the same batches. What is done already under --out is not done again, also after a kill.
    """
    from mergestream.bench.analysis.comparison import in_words
    from mergestream.bench.engine.benchmark import run_bench
    from mergestream.bench.engine.request import plan_from
    from mergestream.bench.report.bench_report import terminal_tables
    from mergestream.runtime.parallel import default_workers

    console = Console(stderr=as_json)
    plan = plan_from(
        dataset=dataset,
        root=root,
        pools=pool,
        methods=methods,
        streams=streams,
        targets=targets,
        seeds=seeds,
        batch_size=batch_size,
        protocol=protocol,
        preset=preset,
        data_options=data_option or [],
        images=images,
        reference=reference,
        skip_bad=skip_bad,
        allow_missing_classes=allow_missing_classes,
        allow_seen=allow_seen,
        device=device,
    )
    workers = jobs if jobs is not None else default_workers(device)
    command = shlex.join(["mergestream", *sys.argv[1:]])
    findings = run_bench(plan, out, progress(console), jobs=workers, engine=engine, command=command)
    if as_json:
        typer.echo((out / "results.json").read_text(encoding="utf-8"))
        return
    warnings = [f"Warning: {sentence}" for sentence in findings.sentences]
    rest = [f"{len(warnings) - SHOWN} more warnings: {out / 'results.md'}"] if len(warnings) > SHOWN else []
    files = {"Tables": out / "results.md", "LaTeX": out / "results.tex", "Every run": out / "results.csv"}
    files["Records"] = out / "runs"
    sentences = [*in_words(findings.duels), *warnings[:SHOWN], *rest]
    show(console, terminal_tables(findings), sentences, files)


app.command()(drift)
app.command()(report)
app.command()(serve)
app.command("serve-token")(serve_token)
app.command()(train)


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage. Errors are one line on stderr; a traceback only with --debug."""
    try:
        app(standalone_mode=True)
    except MergestreamError as error:
        if "--debug" in sys.argv:
            raise
        typer.echo(f"mergestream: {error}", err=True)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            typer.echo("mergestream: interrupted. What is finished is kept: the same command goes on.", err=True)
        raise
