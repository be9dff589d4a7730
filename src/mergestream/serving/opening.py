"""What a service opens when it starts: an engine and a log, and other ways in beside HTTP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mergestream.data.intake.pictures import Picture
from mergestream.pool.expert_card import ExpertCard
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.engine.answers import Answer
from mergestream.serving.metrics import Metrics


class PoolView(Protocol):
    """A pool as far as people are shown it."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def cards(self) -> tuple[ExpertCard, ...]: ...


class LineupView(Protocol):
    """Pool, method and who is switched off, as the next batch will find them."""

    @property
    def pool(self) -> PoolView: ...

    @property
    def method(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def off(self) -> tuple[str, ...]: ...

    @property
    def identity(self) -> Mapping[str, Any]: ...


class Answering(Protocol):
    """The engine as the service sees it: the one in this process, or whatever stands before several."""

    @property
    def lineup(self) -> LineupView: ...

    def answer(self, stream: str, pictures: Sequence[Picture]) -> Answer: ...

    def streams(self) -> list[dict[str, Any]]: ...

    def reset(self, stream: str) -> None: ...

    def delete(self, stream: str) -> None: ...

    def switch(self, expert: str, *, on: bool) -> tuple[str, ...]: ...

    def reload(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Log(Protocol):
    """The audit log as the service sees it; `failing` is why its last write failed, None where it worked."""

    @property
    def failing(self) -> str | None: ...

    def append(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Opened:
    """What takes long to open: a pool on its device and the log."""

    engine: Answering
    audit: Log


class Companion(Protocol):
    """Another way in, such as a watched folder: started when the service is ready, stopped before it ends."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class CountedLog:
    """A log whose lines are counted."""

    def __init__(self, audit: Log, metrics: Metrics) -> None:
        self._audit, self._metrics = audit, metrics

    @property
    def failing(self) -> str | None:
        return self._audit.failing

    def append(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            line = self._audit.append(kind, body)
        except AuditError:
            self._metrics.audit(written=False)
            raise
        self._metrics.audit(written=True)
        return line

    def close(self) -> None:
        self._audit.close()


class NoLog:
    """For a service that was told to keep no audit log."""

    failing = None

    def append(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def close(self) -> None:
        pass
