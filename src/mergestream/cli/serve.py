"""`mergestream serve`, `serve-token` and `shadow-report`: parse, call one function, print."""

import gc
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mergestream.cli.shared_options import AsJson
from mergestream.cli.terminal import echo, print_result
from mergestream.runtime.errors import InputError
from mergestream.serving.options import ServeOptions


def serve(**options: Any) -> None:
    """Answer images over HTTP with one merged model per batch: DICOM, a dashboard, an audit trail.

    POST files to /v1/streams/NAME/batches. /docs lists all URLs; / is the dashboard. SIGTERM finishes accepted work.
    """
    gc.disable()  # until the service is ready: otherwise collections take a quarter of the time that imports take
    try:
        _run()(ServeOptions(**options), lambda line: echo(line, err=True))
    finally:
        gc.enable()


def _run() -> Callable[[ServeOptions, Callable[[str], None]], None]:
    try:
        from mergestream.serving.startup import serve as run
    except ModuleNotFoundError as error:
        raise InputError(f"The service needs {error.name}: pip install 'mergestream[serve]'.") from error
    return run


serve.__signature__ = inspect.signature(ServeOptions)  # type: ignore[attr-defined]  # typer reads the options from it


def serve_token(
    name: Annotated[str, typer.Option(help="Name of the holder: a scanner or a system, not a person.")],
    tokens: Annotated[Path, typer.Option(help="Tokens file; created if missing.")],
    role: Annotated[str, typer.Option(help="client: read, and send images; administrator: everything.")] = "client",
) -> None:
    """Make a token and print it once: the file holds only its hash. Remove its line to revoke it."""
    from mergestream.serving.http.tokens import create_token

    echo(create_token(tokens, role, name))


def shadow_report(
    state: Annotated[Path, typer.Argument(help="The --state folder of a service that ran with --shadow.")],
    readings: Annotated[
        Path | None, typer.Option(help="A CSV file: class, and sop_instance_uid or accession. It stays here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the answers of shadow mode with the site's readings, week by week; without readings, count them."""
    from mergestream.serving.reports.shadow_agreement import in_words
    from mergestream.serving.reports.shadow_agreement import shadow_report as compared

    report = compared(state, readings)
    print_result(as_json, report, in_words(report))
