"""mergestream serve …: parse, call one function, print."""

from pathlib import Path
from typing import Annotated

import typer

from mergestream.runtime.errors import InputError


def serve(
    pool: Annotated[Path, typer.Argument(help="The pool: a folder of expert folders.")],
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs --tokens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    method: Annotated[str, typer.Option(help="Name of the method.")] = "entropy_adaptive",
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the method, such as 'momentum=0.9'; repeat for more.")
    ] = None,
    guard: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting of the guards, such as 'fallback=uniform' or 'abstain_below=0.6'; repeat for more."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="that of the pool")
    ] = None,
    state: Annotated[Path, typer.Option(help="Folder for the state of the streams and the audit log.")] = Path(
        "mergestream-service"
    ),
    audit: Annotated[
        Path | None, typer.Option(help="The audit log.", show_default="audit.jsonl in the --state folder")
    ] = None,
    audit_key: Annotated[
        Path | None, typer.Option(help="Private key that signs the log, made by 'mergestream audit key'.")
    ] = None,
    no_audit: Annotated[bool, typer.Option("--no-audit", help="Keep no audit log.")] = False,
    weights_hash: Annotated[
        str,
        typer.Option(
            help="weights: hash the merged weights of each step; recipe: hash pool and coefficients (large networks)."
        ),
    ] = "weights",
    tokens: Annotated[Path | None, typer.Option(help="Tokens file, made by 'mergestream serve-token'.")] = None,
    watch: Annotated[Path | None, typer.Option(help="Also answer files put into this folder.")] = None,
    watch_reports: Annotated[
        bool, typer.Option("--watch-reports", help="Write a DICOM structured report beside each answer there.")
    ] = False,
    max_batch: Annotated[int, typer.Option(help="Largest batch of single images.", min=1)] = 32,
    max_wait_ms: Annotated[float, typer.Option(help="How long a single image waits for others.", min=0)] = 50.0,
    max_streams: Annotated[int, typer.Option(help="Most streams per engine.", min=1)] = 64,
    max_body_mib: Annotated[int, typer.Option(help="Largest request.", min=1)] = 256,
    rate: Annotated[
        float,
        typer.Option(help="Requests per second and token (or address, without tokens); 0: no limit.", min=0),
    ] = 100.0,
    tls_cert: Annotated[Path | None, typer.Option(help="TLS certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    json_log: Annotated[bool, typer.Option("--json-log", help="Write log lines as JSON.")] = False,
    replicas: Annotated[
        int, typer.Option(help="Engines. More than one run behind Ray Serve, with every stream pinned to one.", min=1)
    ] = 1,
) -> None:
    """Answer images over HTTP with one merged model per batch: DICOM, a dashboard, an audit trail.

    POST files to /v1/streams/NAME/batches. /docs lists all URLs; / is the dashboard. SIGTERM finishes accepted work.
    """
    try:
        from mergestream.serving.startup import ServeOptions
        from mergestream.serving.startup import serve as run
    except ModuleNotFoundError as error:
        raise InputError(f"The service needs {error.name}: pip install 'mergestream[serve]'.") from error
    options = ServeOptions(
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
    run(options, lambda line: typer.echo(line, err=True))


def serve_token(
    name: Annotated[str, typer.Option(help="Name of the holder: a scanner or a system, not a person.")],
    tokens: Annotated[Path, typer.Option(help="Tokens file; created if missing.")],
    role: Annotated[str, typer.Option(help="client: read, and send images; administrator: everything.")] = "client",
) -> None:
    """Make a token and print it once: the file holds only its hash. Remove its line to revoke it."""
    from mergestream.serving.http.tokens import create_token

    typer.echo(create_token(tokens, role, name))
