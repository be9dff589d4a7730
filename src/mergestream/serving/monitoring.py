"""Metrics for Prometheus, and recent steps, latencies and counts for the dashboard."""

import math
import threading
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from mergestream.serving.audit.lines import now
from mergestream.serving.engine.answers import Answer
from mergestream.serving.engine.persistence import HISTORY
from mergestream.serving.http.schemas import RecentStep

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LATENCIES = 4096  # the last ones, for percentiles
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class Metrics:
    """Thread-safe. Labels are routes and codes of our own and names of streams, never other text from a client."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = self._counter("requests", "Requests by route and status.", ("method", "route", "status"))
        self._seconds = Histogram(
            "mergestream_request_seconds", "From a request's first line to the last byte of its response.", ("route",),
            buckets=BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._images = self._counter("images", "Answered images.")
        self._steps = self._counter("steps", "Steps: answered batches.")
        self._step_seconds = Histogram(
            "mergestream_step_seconds", "A step including its audit line.", buckets=BUCKETS, registry=self.registry
        )
        self._findings = self._counter(
            "findings", "Findings of the guards, by stream, code and severity.", ("stream", "code", "severity")
        )
        self._audit_lines = self._counter("audit_lines", "Lines appended to the audit log.")
        self._audit_failures = self._counter("audit_failures", "Lines that could not be appended.")
        self._lock = threading.Lock()
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._outcomes: Tally[str] = Tally()
        self._recent: dict[str, deque[RecentStep]] = {}

    def _counter(self, name: str, about: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"mergestream_{name}", about, labels, registry=self.registry)

    def add_gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Add a number that is computed whenever the metrics are read."""
        Gauge(f"mergestream_{name}", about, registry=self.registry).set_function(value)

    def request(self, method: str, route: str, status: int, seconds: float, *, with_images: bool) -> None:
        """Count a request. Percentiles and outcomes are of requests with images only."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        if with_images:
            outcome = "answered" if status < 400 else "refused" if status < 500 else "failed"
            with self._lock:
                self._outcomes[outcome] += 1
                if outcome == "answered":
                    self._latencies.append(1000 * seconds)

    def step(self, answer: Answer) -> None:
        self._steps.inc()
        self._images.inc(answer.batch_size)
        self._step_seconds.observe(answer.seconds)
        for finding in answer.findings:
            self._findings.labels(answer.stream, finding.code, finding.severity).inc()
        self.keep(answer, now())

    def keep(self, answer: Answer, time: str) -> None:
        """Keep a step, of this process or an earlier one, for the dashboard."""
        with self._lock:
            self._recent.setdefault(answer.stream, deque(maxlen=HISTORY)).append(_recent_step(answer, time))

    def recent(self, stream: str, after: int = -1) -> list[RecentStep]:
        """The last steps of a stream, or those of them after this number."""
        with self._lock:
            return [each for each in self._recent.get(stream, ()) if each.step > after]

    def forget(self, stream: str) -> None:
        """Drop the numbers of a deleted stream, so that they cannot grow without end."""
        self._findings.remove_by_labels({"stream": stream})
        with self._lock:
            self._recent.pop(stream, None)

    def audit_line(self, written: bool) -> None:
        (self._audit_lines if written else self._audit_failures).inc()

    def outcomes(self) -> dict[str, int]:
        with self._lock:
            return {name: self._outcomes[name] for name in ("answered", "refused", "failed")}

    def latency(self) -> dict[str, float | None]:
        """Percentiles of the last requests in milliseconds; None before the first."""
        with self._lock:
            ordered = sorted(self._latencies)
        return {name: _percentile(ordered, share) for name, share in PERCENTILES.items()}

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that this share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def _recent_step(answer: Answer, time: str) -> RecentStep:
    counts = Tally("undecided" if each is None else each for each in answer.predictions)
    return RecentStep(
        step=answer.step,
        time=time,
        images=answer.batch_size,
        encoder_coefficients=answer.encoder_coefficients or {},
        head_coefficients=answer.head_coefficients or {},
        entropies=answer.entropy or {},
        head_expert=answer.head_expert,
        predictions_per_class=dict.fromkeys(answer.classes, 0) | counts,
        findings=list(answer.findings),
        milliseconds=1000 * answer.seconds,
    )
