"""The last steps of every stream in memory, for whoever watches. No picture and no single result is among them."""

import threading
from collections import Counter, deque
from datetime import UTC, datetime
from typing import Any

from mergestream.serving.engine.answers import Answer, PerExpert

KEPT = 200  # steps a stream


class RecentSteps:
    """For any number of threads."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept, self._lock = kept, threading.Lock()
        self._steps: dict[str, deque[dict[str, Any]]] = {}

    def add(self, answer: Answer) -> None:
        with self._lock:
            self._steps.setdefault(answer.stream, deque(maxlen=self._kept)).append(_step(answer))

    def after(self, stream: str, step: int) -> list[dict[str, Any]]:
        with self._lock:
            return [each for each in self._steps.get(stream, ()) if each["step"] > step]

    def last(self, stream: str) -> dict[str, Any] | None:
        with self._lock:
            steps = self._steps.get(stream)
            return steps[-1] if steps else None

    def forget(self, stream: str) -> None:
        with self._lock:
            self._steps.pop(stream, None)


def by_expert(answer: Answer, numbers: PerExpert) -> dict[str, float | None]:
    """Numbers under the experts' names; nothing where no single merged model answered."""
    return {} if numbers is None else dict(zip(answer.experts, numbers, strict=True))


def timestamp(seconds: float | None = None) -> str:
    """UTC as ISO 8601 with milliseconds; now, unless told otherwise."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _step(answer: Answer) -> dict[str, Any]:
    said = Counter("undecided" if each is None else each for each in answer.predictions)
    return {
        "step": answer.step,
        "time": timestamp(),
        "images": answer.batch_size,
        "encoder_coefficients": by_expert(answer, answer.encoder_coefficients),
        "head_coefficients": by_expert(answer, answer.head_coefficients),
        "entropies": by_expert(answer, answer.entropy),
        "head_expert": answer.head_expert,
        "predictions_per_class": {name: said.get(name, 0) for name in answer.classes}
        | ({"undecided": said["undecided"]} if said["undecided"] else {}),
        "findings": [finding.to_json() for finding in answer.findings],
        "milliseconds": 1000 * answer.seconds,
    }
