"""One of several engines, in a process of its own, and how it stands, for whoever cannot wait for it."""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.errors import MergestreamError
from mergestream.serving.engine_request import EngineRequest, open_engine
from mergestream.serving.opening import Opened

T = TypeVar("T")


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
    """What an engine answers, or refuses, and how it stands after it: nowhere, if it could not be opened."""

    view: View | None
    value: Any = None
    refusal: MergestreamError | None = None


class PinnedEngine:
    """One engine with its log, in the process that Ray Serve gives it."""

    def __init__(self, request: EngineRequest, number: int) -> None:
        # A GPU is for one thread alone, as in the service.
        self._thread = None if request.device == "cpu" else ThreadPoolExecutor(1, "device")
        self._opened: Opened | None = None
        self._refusal: MergestreamError | None = None
        self._refused = False  # somebody was told so
        try:
            self._opened = self._run(partial(open_engine, request.pinned(number)))
        except MergestreamError as refusal:  # told to whoever asks first: Serve would keep it to itself
            self._refusal = refusal

    def call(self, method: str, *arguments: Any, **options: Any) -> Told:
        """A method of the engine, or 'append' to its log."""
        if self._opened is None:
            return self._refuse()
        target = self._opened.audit.append if method == "append" else getattr(self._opened.engine, method)
        try:
            value = self._run(partial(target, *arguments, **options))
        except MergestreamError as refusal:
            return Told(self._view(self._opened), refusal=refusal)
        return Told(self._view(self._opened), value)

    def look(self) -> Told:
        return self._refuse() if self._opened is None else Told(self._view(self._opened), os.getpid())

    def check_health(self) -> None:
        """Asked by Serve, which starts an engine that could not be opened again, once it has told why."""
        if self._refused and self._refusal is not None:
            raise self._refusal

    def __del__(self) -> None:
        """Serve's way to say that the process will end; the next one needs the folder's locks."""
        opened = getattr(self, "_opened", None)
        if opened is not None:
            opened.engine.close()
            opened.audit.close()

    def _run(self, work: Callable[[], T]) -> T:
        return work() if self._thread is None else self._thread.submit(work).result()

    def _refuse(self) -> Told:
        self._refused = True
        return Told(None, refusal=self._refusal)

    @staticmethod
    def _view(opened: Opened) -> View:
        found = opened.engine.lineup
        pool = ShownPool(found.pool.names, found.pool.classes, found.pool.cards)
        lineup = ShownLineup(pool, found.method, found.options, found.off, found.identity)
        return View(time.time_ns(), lineup, tuple(opened.engine.streams()), opened.audit.failing)
