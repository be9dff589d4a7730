"""Options of an engine, and the engine with its audit log: opened in this process or in that of a replica."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch

from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import one_of
from mergestream.serving.audit.keys import PrivateKey, read_private_key
from mergestream.serving.audit.log_writer import AuditLog, NoAuditLog
from mergestream.serving.engine.engine import Engine
from mergestream.serving.engine.persistence import recent_lines
from mergestream.serving.engine.settings import EngineSettings

if TYPE_CHECKING:
    from mergestream.serving.replicas.replicated_engine import ReplicatedEngine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class OpenEngine(NamedTuple):
    """An engine and its audit log. A `ReplicatedEngine` is both: it stands for several engines and their logs."""

    engine: Union[Engine, "ReplicatedEngine"]
    log: Union[AuditLog, NoAuditLog, "ReplicatedEngine"]


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine; they can be sent to another process. Paths are those of the machine it runs on.

    `audit` None: <state>/audit.jsonl. `dtype` None: that of the pool. `threads`: CPU cores per replica.
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

    def for_replica(self, number: int) -> "EngineOptions":
        """The same options with a state folder and a log of its own."""
        return replace(self, state=self.state / f"engine-{number:03d}", audit=None)

    def absolute(self) -> "EngineOptions":
        """The same options for a process with another working folder."""
        key = None if self.audit_key is None else self.audit_key.absolute()
        return replace(self, pool=self.pool.absolute(), state=self.state.absolute(), audit_key=key)

    def private_key(self) -> PrivateKey | None:
        return None if self.audit_key is None else read_private_key(self.audit_key)

    def load_pool(self) -> ExpertPool:
        """Load the experts on their device. The pool must say how pixels are prepared."""
        dtype = None if self.dtype is None else DTYPES[self.dtype]
        pool = ExpertPool.load(self.pool, device=self.device, dtype=dtype)
        if pool.preprocessing is None:
            raise InputError(
                f"{self.pool} does not say how pixels are prepared for its network, so images cannot be served. "
                "Save it with preprocessing=mergestream.Preprocessing(size=…)."
            )
        return pool


def open_engine(options: EngineOptions, on_append: Callable[[bool], None] = lambda _: None) -> OpenEngine:
    """Load the pool, open the log and start the engine. `on_append` hears of each line: written or not."""
    pool, path = options.load_pool(), options.log_file
    log = NoAuditLog() if path is None else AuditLog.open(path, options.private_key(), on_append=on_append)
    try:
        engine = Engine(
            pool,
            options.method,
            options.options,
            audit=log,
            state_folder=options.state / "streams",
            settings=options.settings,
            recent=() if path is None else recent_lines(path),
            load_pool=options.load_pool,
        )
    except BaseException:
        log.close()
        raise
    return OpenEngine(engine, log)
