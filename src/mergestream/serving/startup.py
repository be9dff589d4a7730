"""What a person asked for, in words -> a running service."""

import logging
from collections.abc import Callable, Mapping, Sequence
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
from mergestream.serving.engine_request import EngineRequest, open_engine
from mergestream.serving.guards.findings import GuardSettings
from mergestream.serving.http.gate import is_loopback
from mergestream.serving.http.request_limits import ServiceLimits
from mergestream.serving.http.server import Address, run
from mergestream.serving.http.tokens import Tokens
from mergestream.serving.logs import log_to_stderr
from mergestream.serving.metrics import Metrics
from mergestream.serving.micro_batching import BatchingSettings
from mergestream.serving.opening import CountedLog, Opened
from mergestream.serving.replicas.ray_cluster import require_ray_serve, start
from mergestream.serving.service import ENGINE_THREADS, Service
from mergestream.serving.watched_folder.folder_thread import FolderThread

DEVICES = ("auto", "cpu", "cuda")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeRequest:
    """`mergestream serve` as it was typed. `audit` None: <state>/audit.jsonl."""

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


def serve(request: ServeRequest, say: Callable[[str], None] = lambda _: None) -> None:
    """Run the service until a signal ends it. Whatever can be found wrong is, before it listens or loads."""
    tokens = None if request.tokens is None else Tokens(request.tokens)
    _require_safe(request)
    wanted, limits, hosts = _engine_request(request), _limits(request), _hosts(request)
    alone = request.replicas == 1
    service = Service(
        _opener(wanted, request.replicas, limits.answer_seconds),
        limits,
        tokens=tokens,
        hosts=hosts,
        one_thread=alone and wanted.device != "cpu",
        threads=ENGINE_THREADS * request.replicas,
    )
    if request.watch is not None:
        make_folder(request.watch)
        service.attend(FolderThread(service, request.watch, reports=request.watch_reports))
    log_to_stderr(as_json=request.json_log)
    for sentence in _in_words(request, wanted):
        say(sentence)
    address = Address(request.host, request.port, request.tls_cert, request.tls_key)
    run(service, address, lambda url: say(f"Ready: {url} (dashboard), {url}/docs. End it with Ctrl+C or SIGTERM."))


def _engine_request(request: ServeRequest) -> EngineRequest:
    """What needs no pool is checked now."""
    replicas = whole_number("replicas", request.replicas, low=1)
    if replicas > 1 and request.audit is not None:
        raise InputError("With --replicas each engine keeps a log of its own in the --state folder: leave out --audit.")
    guards = GuardSettings(**dict(_known_guards(request.guards)))
    wanted = EngineRequest(
        pool=request.pool,
        state=request.state,
        method=request.method,
        options=dict(parse_options(request.options)),
        settings=EngineSettings(guards=guards, most_streams=request.max_streams, weights_hash=request.weights_hash),
        audit=request.audit,
        audit_key=request.audit_key,
        no_audit=request.no_audit,
        device=_device(request),
        dtype=request.dtype,
        threads=max(1, torch.get_num_threads() // replicas),
    )
    wanted.private_key()
    make_folder(request.state)
    return wanted


def _opener(wanted: EngineRequest, replicas: int, seconds: float) -> Callable[[Metrics], Opened]:
    """Opens an engine here, or several in processes of their own."""
    if replicas == 1:
        return lambda metrics: open_engine(wanted, lambda audit: CountedLog(audit, metrics))
    require_ray_serve()

    def opened(metrics: Metrics) -> Opened:
        engines = start(wanted, replicas, seconds, count=lambda written: metrics.audit(written=written))
        return Opened(engines, engines)

    return opened


def _device(request: ServeRequest) -> str:
    one_of("device", request.device, DEVICES)
    if request.device == "cuda" and not torch.cuda.is_available():
        raise InputError("This machine has no CUDA device that PyTorch can use. Give --device cpu or auto.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if request.device == "auto" else request.device


def _known_guards(texts: Sequence[str]) -> Mapping[str, Any]:
    given = dict(parse_options(texts))
    for name in given:
        one_of("guard", name, tuple(GuardSettings.__dataclass_fields__))
    if "fallback" in given:  # 'none' is its name here, not nothing
        given["fallback"] = "none" if given["fallback"] is None else str(given["fallback"])
    if isinstance(given.get("fallback_on"), str):
        given["fallback_on"] = (given["fallback_on"],)
    return given


def _limits(request: ServeRequest) -> ServiceLimits:
    batching = BatchingSettings(count=request.max_batch, seconds=request.max_wait_ms / 1000)
    body_bytes = request.max_body_mib * MEBIBYTE
    burst = max(1, round(2 * request.rate))
    return ServiceLimits(body_bytes=body_bytes, rate=request.rate, burst=burst, batching=batching)


def _require_safe(request: ServeRequest) -> None:
    if request.tokens is None and not is_loopback(request.host):
        raise InputError(
            f"Whoever reaches {request.host} could use the service. Make a token with 'mergestream serve-token' "
            "and give its file as --tokens, or listen at 127.0.0.1."
        )
    if (request.tls_cert is None) != (request.tls_key is None):
        raise InputError("TLS takes both --tls-cert and --tls-key.")


def _hosts(request: ServeRequest) -> Sequence[str] | None:
    """Without tokens, only requests that address this very machine: no web page can make a browser send others."""
    return (*LOOPBACK_NAMES, request.host.lower()) if request.tokens is None else None


def _in_words(request: ServeRequest, wanted: EngineRequest) -> list[str]:
    """What an operator should know before the first request."""
    said = ["For research. Not a medical device.", f"{_logged(wanted, request.replicas)}{_signed(request)}"]
    if not is_loopback(request.host) and request.tls_cert is None:
        said.append("Warning: without --tls-cert and --tls-key, tokens and pictures cross the network unencrypted.")
    return [*said, f"Loading {request.pool} …"]


def _logged(wanted: EngineRequest, replicas: int) -> str:
    if wanted.no_audit:
        return "No audit log is kept."
    logs = [wanted.log_file] if replicas == 1 else [wanted.pinned(n).log_file for n in range(replicas)]
    return f"Audit log: {logs[0]}" if replicas == 1 else f"Audit logs, one an engine: {', '.join(map(str, logs))}"


def _signed(request: ServeRequest) -> str:
    return (
        ""
        if request.audit_key or request.no_audit
        else " (not signed: give a key of 'mergestream audit key' as --audit-key)"
    )
