"""What a person asked for, in words -> a running service."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mergestream.errors import InputError
from mergestream.files import make_folder
from mergestream.options import one_of
from mergestream.pool import ExpertPool
from mergestream.serving.audit.keys import read_signer
from mergestream.serving.audit.writing import AuditLog
from mergestream.serving.batching import BatchingSettings
from mergestream.serving.engine import Engine
from mergestream.serving.findings import GuardSettings
from mergestream.serving.folder import FolderThread
from mergestream.serving.gate import is_loopback
from mergestream.serving.intake.limits import MEBIBYTE
from mergestream.serving.limiting import ServiceLimits
from mergestream.serving.logs import log_to_stderr
from mergestream.serving.metrics import Metrics
from mergestream.serving.opening import CountedLog, NoLog, Opened
from mergestream.serving.persistence import recent_lines
from mergestream.serving.server import Address, run
from mergestream.serving.service import Service
from mergestream.serving.settings import EngineSettings
from mergestream.serving.tokens import Tokens
from mergestream.spelling import parse_options

DEVICES = ("auto", "cpu", "cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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

    @property
    def log_file(self) -> Path | None:
        return None if self.no_audit else self.audit or self.state / "audit.jsonl"


def serve(request: ServeRequest, say: Callable[[str], None] = lambda _: None) -> None:
    """Run the service until a signal ends it. Whatever can be found wrong is, before it listens or loads."""
    tokens = None if request.tokens is None else Tokens(request.tokens)
    _require_safe(request)
    device = _device(request)
    opener, limits, hosts = _opener(request, device), _limits(request), _hosts(request)
    service = Service(opener, limits, tokens=tokens, hosts=hosts, one_thread=device != "cpu")
    if request.watch is not None:
        service.attend(FolderThread(service, request.watch, reports=request.watch_reports))
    log_to_stderr(as_json=request.json_log)
    for sentence in _in_words(request):
        say(sentence)
    address = Address(request.host, request.port, request.tls_cert, request.tls_key)
    run(service, address, lambda url: say(f"Ready: {url} (dashboard), {url}/docs. End it with Ctrl+C or SIGTERM."))


def _opener(request: ServeRequest, device: str) -> Callable[[Metrics], Opened]:
    """Opens log and engine; what needs no pool is checked now."""
    if request.dtype is not None:
        one_of("dtype", request.dtype, tuple(DTYPES))
    if request.no_audit and (request.audit or request.audit_key):
        raise InputError("--no-audit keeps no log: leave out --audit and --audit-key, or leave out --no-audit.")
    guards = GuardSettings(**dict(_known_guards(request.guards)))
    settings = EngineSettings(guards=guards, most_streams=request.max_streams, weights_hash=request.weights_hash)
    signer = None if request.audit_key is None else read_signer(request.audit_key)
    dtype = None if request.dtype is None else DTYPES[request.dtype]
    load_pool = partial(ExpertPool.load, request.pool, device=device, dtype=dtype)
    options = dict(parse_options(request.options))
    make_folder(request.state)

    def opened(metrics: Metrics) -> Opened:
        pool = load_pool()
        if pool.preprocessing is None:
            raise InputError(
                f"{request.pool} does not say how pixels are prepared for its network, so pictures cannot be served. "
                "Save it with preprocessing=mergestream.Preprocessing(size=…)."
            )
        path = request.log_file
        audit = CountedLog(NoLog() if path is None else AuditLog.open(path, signer), metrics)
        try:
            engine = Engine(
                pool,
                request.method,
                options,
                audit=audit,
                state_folder=request.state / "streams",
                settings=settings,
                recent=() if path is None else recent_lines(path),
                load_pool=load_pool,
            )
        except BaseException:
            audit.close()
            raise
        return Opened(engine, audit)

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


def _in_words(request: ServeRequest) -> list[str]:
    """What an operator should know before the first request."""
    audited = request.log_file
    said = ["For research. Not a medical device."]
    said.append("No audit log is kept." if audited is None else f"Audit log: {audited}{_signed(request)}")
    if not is_loopback(request.host) and request.tls_cert is None:
        said.append("Warning: without --tls-cert and --tls-key, tokens and pictures cross the network unencrypted.")
    return [*said, f"Loading {request.pool} …"]


def _signed(request: ServeRequest) -> str:
    return "" if request.audit_key else " (not signed: give a key of 'mergestream audit key' as --audit-key)"
