"""The command line: all commands, and what every one of them shares: version, logging, errors, exit codes."""

import logging
import sys
import traceback
from typing import Annotated

import typer

from mergestream import __version__
from mergestream.cli.audit import audit
from mergestream.cli.bench import bench
from mergestream.cli.data import data
from mergestream.cli.demo import demo
from mergestream.cli.drift import DriftCommand, drift, landscape
from mergestream.cli.methods import methods
from mergestream.cli.pool import pool
from mergestream.cli.pool_experts import card, export, init, make_key, remove, revoke, sign, statistics
from mergestream.cli.report import report
from mergestream.cli.reproduce import reproduce
from mergestream.cli.serve import serve, serve_token, shadow_report
from mergestream.cli.sites import choose, matrix, site_report
from mergestream.cli.terminal import echo
from mergestream.cli.train import train
from mergestream.runtime.errors import USAGE_ERRORS, MergestreamError
from mergestream.runtime.messages import PrintableFormatter

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="mergestream",
    help="Many hospitals' models in, one model per batch out: online, label-free, forward passes only.",
    epilog="For research. Not a medical device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.add_typer(data, name="data")
pool.command("key")(make_key)
for pool_command in (sign, remove, revoke, init, card, export, statistics):
    pool.command()(pool_command)
app.add_typer(pool, name="pool")
app.add_typer(audit, name="audit")
for command in (
    bench,
    choose,
    drift,
    landscape,
    matrix,
    methods,
    report,
    reproduce,
    serve,
    serve_token,
    shadow_report,
    site_report,
    train,
):
    app.command(cls=DriftCommand if command is drift else None)(command)


def _print_version(requested: bool) -> None:
    if requested:
        echo(f"mergestream {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error, and log details.")] = False,
) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler])


def main() -> None:
    """Run the command in `sys.argv`. Exit codes: 0 done, 1 failed, 2 wrong usage.

    Errors are one line on stderr; a traceback only with --debug.
    """
    try:
        app(standalone_mode=True, prog_name="mergestream")  # also as python -m mergestream: completion needs it
    except MergestreamError as error:
        if "--debug" in sys.argv:
            echo(*traceback.format_exc().splitlines(), err=True)
        else:
            echo(f"mergestream: {error}", err=True)
        sys.exit(WRONG_USAGE if isinstance(error, USAGE_ERRORS) else FAILED)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            echo("mergestream: interrupted. Finished work is kept: the same command continues it.", err=True)
        raise
