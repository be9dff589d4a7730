"""What a person wants of an engine, and the engine with its log that comes of it: in this process, or in another's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import one_of
from mergestream.serving.audit.keys import PrivateKey, read_private_key
from mergestream.serving.audit.log_writer import AuditLog
from mergestream.serving.engine.engine import Engine
from mergestream.serving.engine.persistence import recent_lines
from mergestream.serving.engine.settings import EngineSettings
from mergestream.serving.opening import Log, NoLog, Opened

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class EngineRequest:
    """What an engine is made of; another process may be told so. Paths are those of the machine it runs on.

    `audit` None: <state>/audit.jsonl. `dtype` None: that of the pool. `threads`: cores that one of several engines may
    use.
    """

    pool: Path
    state: Path
    method: str = "entropy_adaptive"
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: EngineSettings = field(default_factory=EngineSettings)
    audit: Path | None = None
    audit_key: Path | None = None
    no_audit: bool = False
    device: str = "cpu"
    dtype: str | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        if self.dtype is not None:
            one_of("dtype", self.dtype, tuple(DTYPES))
        if self.no_audit and (self.audit or self.audit_key):
            raise InputError("--no-audit keeps no log: leave out --audit and --audit-key, or leave out --no-audit.")

    @property
    def log_file(self) -> Path | None:
        return None if self.no_audit else self.audit or self.state / "audit.jsonl"

    def pinned(self, number: int) -> "EngineRequest":
        """The same for one of several engines: a folder and a log of its own."""
        return replace(self, state=self.state / f"engine-{number:03d}", audit=None)

    def absolute(self) -> "EngineRequest":
        """The same for a process that was started in another folder."""
        key = None if self.audit_key is None else self.audit_key.absolute()
        return replace(self, pool=self.pool.absolute(), state=self.state.absolute(), audit_key=key)

    def private_key(self) -> PrivateKey | None:
        return None if self.audit_key is None else read_private_key(self.audit_key)

    def load_pool(self) -> ExpertPool:
        """The experts on their device; refused where nobody knows how pixels are prepared for them."""
        dtype = None if self.dtype is None else DTYPES[self.dtype]
        pool = ExpertPool.load(self.pool, device=self.device, dtype=dtype)
        if pool.preprocessing is None:
            raise InputError(
                f"{self.pool} does not say how pixels are prepared for its network, so pictures cannot be served. "
                "Save it with preprocessing=mergestream.Preprocessing(size=…)."
            )
        return pool


def open_engine(request: EngineRequest, watched: Callable[[Log], Log] = lambda log: log) -> Opened:
    """The engine, with its log as `watched` gives it back."""
    pool, path = request.load_pool(), request.log_file
    audit = watched(NoLog() if path is None else AuditLog.open(path, request.private_key()))
    try:
        engine = Engine(
            pool,
            request.method,
            request.options,
            audit=audit,
            state_folder=request.state / "streams",
            settings=request.settings,
            recent=() if path is None else recent_lines(path),
            load_pool=request.load_pool,
        )
    except BaseException:
        audit.close()
        raise
    return Opened(engine, audit)
