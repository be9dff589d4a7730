"""mergestream serve …: parse, call one function, print."""

from pathlib import Path
from typing import Annotated

import typer

from mergestream.runtime.errors import InputError


def serve(
    pool: Annotated[Path, typer.Argument(help="The pool: a folder of expert folders.")],
    host: Annotated[str, typer.Option(help="Where to listen; others than this machine need --tokens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    method: Annotated[str, typer.Option(help="Who merges: a method by its name.")] = "entropy_adaptive",
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the method, as in 'momentum=0.9'; again for more.")
    ] = None,
    guard: Annotated[
        list[str] | None,
        typer.Option(help="A setting of the guard rails, as in 'fallback=uniform' or 'abstain_below=0.6'."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="that of the pool")
    ] = None,
    state: Annotated[
        Path, typer.Option(help="A folder for what must survive a restart: moving averages, the audit log.")
    ] = Path("mergestream-service"),
    audit: Annotated[
        Path | None, typer.Option(help="The audit log.", show_default="audit.jsonl in the --state folder")
    ] = None,
    audit_key: Annotated[
        Path | None, typer.Option(help="The key that signs the log, made by 'mergestream audit key'.")
    ] = None,
    no_audit: Annotated[bool, typer.Option("--no-audit", help="Keep no audit log.")] = False,
    weights_hash: Annotated[
        str,
        typer.Option(
            help="weights: hash the merged weights of each step; recipe: what they are made of (large networks)."
        ),
    ] = "weights",
    tokens: Annotated[Path | None, typer.Option(help="The tokens' file, made by 'mergestream serve-token'.")] = None,
    watch: Annotated[Path | None, typer.Option(help="Also answer files that are put into this folder.")] = None,
    watch_reports: Annotated[
        bool, typer.Option("--watch-reports", help="Write a DICOM structured report beside each answer there.")
    ] = False,
    max_batch: Annotated[int, typer.Option(help="Single pictures that are answered together at most.", min=1)] = 32,
    max_wait_ms: Annotated[float, typer.Option(help="How long a single picture waits for others.", min=0)] = 50.0,
    max_streams: Annotated[int, typer.Option(help="Streams that an engine keeps at most.", min=1)] = 64,
    max_body_mib: Annotated[int, typer.Option(help="The largest request.", min=1)] = 256,
    rate: Annotated[
        float,
        typer.Option(help="Requests a second of one token, or of one address without tokens; 0 is no limit.", min=0),
    ] = 100.0,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate (PEM): speak HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    json_log: Annotated[bool, typer.Option("--json-log", help="Log lines of JSON.")] = False,
    replicas: Annotated[
        int, typer.Option(help="Engines; more than one run behind Ray Serve, every stream pinned to one.", min=1)
    ] = 1,
) -> None:
    """Answer pictures over HTTP with one merged model per batch: DICOM in, a dashboard, an audit trail.

    POST files to /v1/streams/NAME/batches. /docs lists all addresses; / is the dashboard. SIGTERM finishes accepted
    work.
    """
    try:
        from mergestream.serving.startup import ServeRequest
        from mergestream.serving.startup import serve as run
    except ModuleNotFoundError as error:
        raise InputError(f"The service needs {error.name}: pip install 'mergestream[serve]'.") from error
    request = ServeRequest(
        pool=pool,
        host=host,
        port=port,
        method=method,
        options=option or [],
        guards=guard or [],
        device=device,
        dtype=dtype,
        state=state,
        audit=audit,
        audit_key=audit_key,
        no_audit=no_audit,
        weights_hash=weights_hash,
        tokens=tokens,
        watch=watch,
        watch_reports=watch_reports,
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        max_streams=max_streams,
        max_body_mib=max_body_mib,
        rate=rate,
        tls_cert=tls_cert,
        tls_key=tls_key,
        json_log=json_log,
        replicas=replicas,
    )
    run(request, lambda sentence: typer.echo(sentence, err=True))


def serve_token(
    name: Annotated[str, typer.Option(help="Whom it is for: a scanner or a system, not a person.")],
    tokens: Annotated[Path, typer.Option(help="The file to add it to; made if it is missing.")],
    role: Annotated[str, typer.Option(help="client: read and send pictures; administrator: all.")] = "client",
) -> None:
    """Make a token and print it, once: the file holds its hash only. Remove its line there to revoke it."""
    from mergestream.serving.http.tokens import create_token

    typer.echo(create_token(tokens, role, name))
