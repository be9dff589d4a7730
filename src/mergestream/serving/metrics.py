"""What Prometheus reads at /metrics, and the few numbers of it that the dashboard shows."""

import math
import threading
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from mergestream.serving.engine.answers import Answer

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REMEMBERED = 4096  # latencies behind the percentiles
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class Metrics:
    """For any number of threads. Labels are routes, codes and kinds of our own: nothing that a client chose."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = self._counter("requests", "Requests by route and status.", ("method", "route", "status"))
        self._seconds = Histogram(
            "mergestream_request_seconds", "From a request's first line to its answer's last byte.", ("route",),
            buckets=BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._images = self._counter("images", "Pictures that were answered.")
        self._steps = self._counter("steps", "Steps: batches that were answered.")
        self._step_seconds = Histogram(
            "mergestream_step_seconds", "A step, with its audit line.", buckets=BUCKETS, registry=self.registry
        )
        self._findings = self._counter("findings", "What guard rails said, by code and severity.", ("code", "severity"))
        self._audit_lines = self._counter("audit_lines", "Lines appended to the audit log.")
        self._audit_failures = self._counter("audit_failures", "Lines that could not be appended.")
        self._lock = threading.Lock()
        self._latencies: deque[float] = deque(maxlen=REMEMBERED)
        self._outcomes: Tally[str] = Tally()

    def _counter(self, name: str, about: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"mergestream_{name}", about, labels, registry=self.registry)

    def watch(self, name: str, about: str, value: Callable[[], float]) -> None:
        """A number that is looked up whenever somebody reads the metrics."""
        Gauge(f"mergestream_{name}", about, registry=self.registry).set_function(value)

    def request(self, method: str, route: str, status: int, seconds: float, *, pictures: bool) -> None:
        """Percentiles and outcomes are those of requests that send pictures, so that watching does not blur them."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        if pictures:
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
            self._findings.labels(finding.code, finding.severity).inc()

    def audit(self, *, written: bool) -> None:
        (self._audit_lines if written else self._audit_failures).inc()

    def outcomes(self) -> dict[str, int]:
        with self._lock:
            return {name: self._outcomes[name] for name in ("answered", "refused", "failed")}

    def latency(self) -> dict[str, float | None]:
        """Percentiles of the last answers in milliseconds; None before the first."""
        with self._lock:
            ordered = sorted(self._latencies)
        return {name: _percentile(ordered, share) for name, share in PERCENTILES.items()}

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest that at least this share does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
