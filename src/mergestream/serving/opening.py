"""What a service opens when it starts: an engine and a log, and other ways in beside HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mergestream.serving.audit.lines import AuditError
from mergestream.serving.engine import Engine
from mergestream.serving.metrics import Metrics


class Log(Protocol):
    """The audit log as the service sees it; `failing` is why its last write failed, None where it worked."""

    @property
    def failing(self) -> str | None: ...

    def append(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Opened:
    """What takes long to open: a pool on its device and the log."""

    engine: Engine
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
