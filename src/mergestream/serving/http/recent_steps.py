"""The last steps of every stream, in memory, for the dashboard. They hold no image and no single result."""

import threading
from collections import Counter, deque
from typing import Any

from mergestream.serving.engine.answers import Answer
from mergestream.serving.http.answer_document import by_expert
from mergestream.serving.service_log import timestamp

STEPS_PER_STREAM = 200


class RecentSteps:
    """The last steps per stream. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[str, deque[dict[str, Any]]] = {}

    def add(self, answer: Answer) -> None:
        with self._lock:
            self._steps.setdefault(answer.stream, deque(maxlen=STEPS_PER_STREAM)).append(_step_document(answer))

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


def _step_document(answer: Answer) -> dict[str, Any]:
    counts = Counter("undecided" if each is None else each for each in answer.predictions)
    return {
        "step": answer.step,
        "time": timestamp(),
        "images": answer.batch_size,
        "encoder_coefficients": by_expert(answer, answer.encoder_coefficients) or {},
        "head_coefficients": by_expert(answer, answer.head_coefficients) or {},
        "entropies": by_expert(answer, answer.entropy) or {},
        "head_expert": answer.head_expert,
        "predictions_per_class": {name: counts.get(name, 0) for name in answer.classes}
        | ({"undecided": counts["undecided"]} if counts["undecided"] else {}),
        "findings": [finding.to_json() for finding in answer.findings],
        "milliseconds": 1000 * answer.seconds,
    }
