"""Start the service from its command-line options."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mergestream.data.intake.limits import MEBIBYTE
from mergestream.runtime.errors import InputError
from mergestream.runtime.files import make_folder
from mergestream.runtime.option_checks import one_of, whole_number
from mergestream.runtime.option_text import parse_options
from mergestream.serving.engine.settings import EngineSettings
from mergestream.serving.engine_options import EngineOptions, OpenEngine, open_engine
from mergestream.serving.guards.findings import GuardSettings
from mergestream.serving.http.gate import is_loopback
from mergestream.serving.http.request_limits import ServiceLimits
from mergestream.serving.http.server import Address, run
from mergestream.serving.http.tokens import Tokens
from mergestream.serving.micro_batching import BatchingSettings
from mergestream.serving.monitoring import Metrics, timestamp
from mergestream.serving.replicas.ray_cluster import require_ray_serve, start_replicas
from mergestream.serving.service import ENGINE_THREADS, Service
from mergestream.serving.watched_folder import FolderThread

DEVICES = ("auto", "cpu", "cuda")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServeOptions:
    """Options of `mergestream serve`. `audit` None: <state>/audit.jsonl."""

    pool: Path
    host: str = "127.0.0.1"
    port: int = 8000
    method: str = "entropy_adaptive"
    options: Sequence[str] = ()
    guards: Sequence[str] = ()
    device: str = "auto"
    dtype: str | None = None
    state: Path = Path("mergestream-service")
    audit: Path | None = None
    audit_key: Path | None = None
    no_audit: bool = False
    weights_hash: str = "weights"
    tokens: Path | None = None
    watch: Path | None = None
    watch_reports: bool = False
    max_batch: int = 32
    max_wait_ms: float = 50.0
    max_streams: int = 64
    max_body_mib: int = 256
    rate: float = 100.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    json_log: bool = False
    replicas: int = 1


def serve(options: ServeOptions, print_line: Callable[[str], None] = lambda _: None) -> None:
    """Run the service until a signal ends it. Options are checked before it listens or loads anything."""
    tokens = None if options.tokens is None else Tokens(options.tokens)
    _require_safe(options)
    engine, limits, hosts = _engine_options(options), _limits(options), _hosts(options)
    service = Service(
        _opener(engine, options.replicas, limits.answer_seconds),
        limits,
        tokens=tokens,
        hosts=hosts,
        one_thread=options.replicas == 1 and engine.device != "cpu",
        threads=ENGINE_THREADS * options.replicas,
    )
    if options.watch is not None:
        make_folder(options.watch)
        service.folder = FolderThread(service, options.watch, reports=options.watch_reports)
    log_to_stderr(as_json=options.json_log)
    for line in _notices(options, engine):
        print_line(line)
    address = Address(options.host, options.port, options.tls_cert, options.tls_key)
    run(
        service,
        address,
        lambda url: print_line(f"Ready: {url} (dashboard), {url}/docs. Stop it with Ctrl+C or SIGTERM."),
    )


def _engine_options(options: ServeOptions) -> EngineOptions:
    """The engine's options, checked as far as that needs no pool."""
    replicas = whole_number("replicas", options.replicas, low=1)
    if replicas > 1 and options.audit is not None:
        raise InputError("With --replicas each engine has its own log in the --state folder: leave out --audit.")
    guards = GuardSettings(**_guard_settings(options.guards))
    engine = EngineOptions(
        pool=options.pool,
        state=options.state,
        method=options.method,
        options=dict(parse_options(options.options)),
        settings=EngineSettings(guards=guards, most_streams=options.max_streams, weights_hash=options.weights_hash),
        audit=options.audit,
        audit_key=options.audit_key,
        no_audit=options.no_audit,
        device=_device(options),
        dtype=options.dtype,
        threads=max(1, torch.get_num_threads() // replicas),
    )
    engine.private_key()
    make_folder(options.state)
    return engine


def _opener(engine: EngineOptions, replicas: int, seconds: float) -> Callable[[Metrics], OpenEngine]:
    """A function that opens one engine in this process, or several replicas in their own processes."""
    if replicas == 1:
        return lambda metrics: open_engine(engine, metrics.audit_line)
    require_ray_serve()

    def open_replicas(metrics: Metrics) -> OpenEngine:
        replicated = start_replicas(engine, replicas, seconds, on_append=metrics.audit_line)
        return OpenEngine(replicated, replicated)

    return open_replicas


def _device(options: ServeOptions) -> str:
    one_of("device", options.device, DEVICES)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("This machine has no CUDA device that PyTorch can use. Give --device cpu or auto.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device


def _guard_settings(texts: Sequence[str]) -> dict[str, Any]:
    settings = dict(parse_options(texts))
    for name in settings:
        one_of("guard", name, tuple(GuardSettings.__dataclass_fields__))
    if "fallback" in settings:  # here 'none' is a name
        settings["fallback"] = "none" if settings["fallback"] is None else str(settings["fallback"])
    if isinstance(settings.get("fallback_on"), str):
        settings["fallback_on"] = (settings["fallback_on"],)
    return settings


def _limits(options: ServeOptions) -> ServiceLimits:
    batching = BatchingSettings(count=options.max_batch, seconds=options.max_wait_ms / 1000)
    body_bytes = options.max_body_mib * MEBIBYTE
    burst = max(1, round(2 * options.rate))
    return ServiceLimits(body_bytes=body_bytes, rate=options.rate, burst=burst, batching=batching)


def _require_safe(options: ServeOptions) -> None:
    if options.tokens is None and not is_loopback(options.host):
        raise InputError(
            f"Everyone who can reach {options.host} could use the service. Make a token with 'mergestream serve-token' "
            "and give its file as --tokens, or listen at 127.0.0.1."
        )
    if (options.tls_cert is None) != (options.tls_key is None):
        raise InputError("TLS takes both --tls-cert and --tls-key.")


def _hosts(options: ServeOptions) -> Sequence[str] | None:
    """Without tokens, only requests addressed to this machine: a web page cannot make a browser send those."""
    return (*LOOPBACK_NAMES, options.host.lower()) if options.tokens is None else None


def _notices(options: ServeOptions, engine: EngineOptions) -> list[str]:
    """Lines for the operator before the service loads."""
    notices = ["For research. Not a medical device.", _log_notice(options, engine)]
    if not is_loopback(options.host) and options.tls_cert is None:
        notices.append("Warning: without --tls-cert and --tls-key, tokens and images cross the network unencrypted.")
    return [*notices, f"Loading {options.pool} …"]


def _log_notice(options: ServeOptions, engine: EngineOptions) -> str:
    if engine.no_audit:
        return "No audit log is kept."
    if options.replicas == 1:
        files = f"Audit log: {engine.log_file}"
    else:
        logs = (str(engine.for_replica(number).log_file) for number in range(options.replicas))
        files = f"Audit logs, one per engine: {', '.join(logs)}"
    unsigned = " (not signed: give a key made by 'mergestream audit key' as --audit-key)"
    return files if options.audit_key else files + unsigned


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the fields of a request as keys."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": timestamp(record.created), "level": record.levelname.lower(), "logger": record.name}
        fields = record.args if isinstance(record.args, dict) else {}
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        return json.dumps({**line, "message": record.getMessage(), **fields}, default=str)


def log_to_stderr(*, as_json: bool) -> None:
    """Log requests and events of the service; of libraries only warnings."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else plain)
    level = logging.DEBUG if logging.getLogger().level == logging.DEBUG else logging.INFO
    # Not even with --debug more: detailed messages of libraries may quote a file's header.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("mergestream.serving").setLevel(level)
