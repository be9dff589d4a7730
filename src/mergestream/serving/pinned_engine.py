"""One of several engines, in a process of its own, and how it stands, for whoever cannot wait for it."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mergestream.checkpoints import ExpertCard
from mergestream.errors import MergestreamError
from mergestream.pool import ExpertPool
from mergestream.serving.audit.keys import read_signer
from mergestream.serving.audit.writing import AuditLog
from mergestream.serving.engine import Engine
from mergestream.serving.persistence import recent_lines
from mergestream.serving.settings import EngineSettings


@dataclass(frozen=True)
class EngineRequest:
    """What every engine is made of. Paths are those of the machine it runs on, so the same on all of them."""

    pool: Path
    state: Path
    method: str = "entropy_adaptive"
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: EngineSettings = field(default_factory=EngineSettings)
    audit_key: Path | None = None
    device: str = "cpu"

    def folder(self, number: int) -> Path:
        return self.state / f"engine-{number:03d}"


@dataclass(frozen=True)
class ShownPool:
    names: tuple[str, ...]
    classes: tuple[str, ...]
    cards: tuple[ExpertCard, ...]


@dataclass(frozen=True)
class ShownLineup:
    """A line-up as far as people are shown it: without the weights."""

    pool: ShownPool
    method: str
    options: Mapping[str, Any]
    off: tuple[str, ...]
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class View:
    """How an engine stands, for whoever cannot wait for it."""

    at: int  # nanoseconds
    lineup: ShownLineup
    streams: tuple[dict[str, Any], ...]
    failing: str | None  # why its log cannot be written


@dataclass(frozen=True)
class Told:
    """What an engine answers, or refuses, and how it stands after it."""

    view: View
    value: Any = None
    refusal: MergestreamError | None = None


class PinnedEngine:
    """One engine with its log, in the process that Ray Serve gives it."""

    def __init__(self, request: EngineRequest, number: int) -> None:
        folder = request.folder(number)
        load_pool = partial(ExpertPool.load, request.pool, device=request.device)
        signer = None if request.audit_key is None else read_signer(request.audit_key)
        self._audit = AuditLog.open(folder / "audit.jsonl", signer)
        try:
            self._engine = Engine(
                load_pool(),
                request.method,
                request.options,
                audit=self._audit,
                state_folder=folder / "streams",
                settings=request.settings,
                recent=recent_lines(self._audit.path),
                load_pool=load_pool,
            )
        except BaseException:
            self._audit.close()
            raise

    def call(self, method: str, *arguments: Any, **options: Any) -> Told:
        """A method of the engine, or 'append' to its log."""
        target = self._audit.append if method == "append" else getattr(self._engine, method)
        try:
            value = target(*arguments, **options)
        except MergestreamError as refusal:
            return Told(self._view(), refusal=refusal)
        return Told(self._view(), value)

    def look(self) -> Told:
        return Told(self._view(), os.getpid())

    def __del__(self) -> None:
        """Serve's way to say that the process will end; the next one needs the folder's locks."""
        if hasattr(self, "_engine"):
            self._engine.close()
            self._audit.close()

    def _view(self) -> View:
        found = self._engine.lineup
        pool = ShownPool(found.pool.names, found.pool.classes, tuple(found.pool.cards))
        lineup = ShownLineup(pool, found.method, found.options, found.off, found.identity)
        return View(time.time_ns(), lineup, tuple(self._engine.streams()), self._audit.failing)
