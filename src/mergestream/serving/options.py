"""The options of `mergestream serve`: one description for the command line, the service and its engines."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import typer

from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import number, one_of, whole_number

DTYPES, DEVICES = ("float32", "bfloat16", "float16"), ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class ServeOptions:
    """Options of the service. They can be sent to another process; paths are those of the machine it runs on."""

    pool: Annotated[Path, typer.Argument(help="The pool: a folder of expert folders.")]
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs --tokens.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000
    method: Annotated[str, typer.Option(help="Name of the method.")] = "entropy_adaptive"
    options: Annotated[
        list[str] | None,
        typer.Option("--option", help="An option of the method, such as 'momentum=0.9'; repeat for more."),
    ] = None
    guards: Annotated[
        list[str] | None,
        typer.Option(
            "--guard",
            help="A setting of the guards, such as 'fallback=uniform' or 'abstain_below=0.6'; repeat for more.",
        ),
    ] = None
    abstain_on: Annotated[
        str | None,
        typer.Option(
            help="Codes of findings that leave an image undecided, separated by commas; none: no finding does.",
            show_default="blank_pictures,structureless_pictures,near_uniform_entropies",
        ),
    ] = None
    single_image_answers: Annotated[
        bool | None,
        typer.Option(
            help="Answer each image from the stream's past and itself alone, never together with others.",
            show_default="for /images, not for /batches",
        ),
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="that of the pool")
    ] = None
    state: Annotated[Path, typer.Option(help="Folder for the state of the streams and the audit log.")] = Path(
        "mergestream-service"
    )
    audit: Annotated[
        Path | None, typer.Option(help="The audit log.", show_default="audit.jsonl in the --state folder")
    ] = None
    audit_key: Annotated[
        Path | None, typer.Option(help="Private key that signs the log, made by 'mergestream audit key'.")
    ] = None
    no_audit: Annotated[bool, typer.Option("--no-audit", help="Keep no audit log.")] = False
    weights_hash: Annotated[
        str,
        typer.Option(
            help="weights: hash the merged weights of each step; recipe: hash pool and coefficients (large networks)."
        ),
    ] = "weights"
    tokens: Annotated[Path | None, typer.Option(help="Tokens file, made by 'mergestream serve-token'.")] = None
    watch: Annotated[Path | None, typer.Option(help="Also answer files put into this folder.")] = None
    watch_reports: Annotated[
        bool, typer.Option("--watch-reports", help="Write a DICOM structured report beside each answer there.")
    ] = False
    webhook: Annotated[
        str | None, typer.Option(help="URL that gets a POST with a small JSON document when an alarm begins.")
    ] = None
    max_batch: Annotated[int, typer.Option(help="Largest batch of single images.", min=1)] = 32
    max_wait_ms: Annotated[
        float, typer.Option(help="How long a single image waits for others, if they are answered together.", min=0)
    ] = 50.0
    longest_wait: Annotated[
        float, typer.Option(help="Seconds; an image that would wait longer for its turn is refused.", min=0.1)
    ] = 5.0
    max_streams: Annotated[int, typer.Option(help="Most streams per engine.", min=1)] = 64
    max_body_mib: Annotated[int, typer.Option(help="Largest request.", min=1)] = 256
    rate: Annotated[
        float,
        typer.Option(help="Requests per second and token (or address, without tokens); 0: no limit.", min=0),
    ] = 100.0
    connections_per_address: Annotated[
        int, typer.Option(help="Most open connections per client address; idle ones are closed first.", min=1)
    ] = 256
    proxies: Annotated[
        list[str] | None,
        typer.Option("--proxy", help="Address of a proxy, which may open any number; repeat for more."),
    ] = None
    streams_per_token: Annotated[int, typer.Option(help="Most streams of one client's token.", min=1)] = 16
    grace_seconds: Annotated[
        float, typer.Option(help="How long SIGTERM waits for requests in progress and clients that read slowly.", min=0)
    ] = 20.0
    tls_cert: Annotated[Path | None, typer.Option(help="TLS certificate (PEM).")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None
    json_log: Annotated[bool, typer.Option("--json-log", help="Write log lines as JSON.")] = False
    replicas: Annotated[
        int, typer.Option(help="Engines. More than one run behind Ray Serve, with every stream pinned to one.", min=1)
    ] = 1

    def __post_init__(self) -> None:
        hints = get_type_hints(ServeOptions, include_extras=True)
        for field in fields(self):
            kind, about = get_args(hints[field.name])
            if about.min is not None:
                check = whole_number if kind is int else number
                check(field.name, getattr(self, field.name), low=about.min)
        one_of("device", self.device, DEVICES)
        if self.dtype is not None:
            one_of("dtype", self.dtype, DTYPES)
        if self.no_audit and (self.audit or self.audit_key):
            raise InputError("--no-audit keeps no log: leave out --audit and --audit-key, or leave out --no-audit.")
        if self.replicas > 1 and self.audit is not None:
            raise InputError("With --replicas each engine has its own log in the --state folder: leave out --audit.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InputError("TLS takes both --tls-cert and --tls-key.")

    @property
    def log_file(self) -> Path | None:
        return None if self.no_audit else self.audit or self.state / "audit.jsonl"

    def for_replica(self, index: int) -> "ServeOptions":
        """The options of one engine of several, with a state folder and a log of its own."""
        return replace(self, state=self.state / f"engine-{index:03d}", audit=None)

    def absolute(self) -> "ServeOptions":
        """The same options for a process with another working folder."""
        key = None if self.audit_key is None else self.audit_key.absolute()
        return replace(self, pool=self.pool.absolute(), state=self.state.absolute(), audit_key=key)
