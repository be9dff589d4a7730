"""`mergestream serve` that also writes how long each stage of a request took, for benchmarks/service.py.

    python3 benchmarks/service_stages.py STAGES.json serve POOL …

It stands in for a tracer, so the stages are the service's own spans: request, body, decode, step, model, guards, audit,
save, respond.
"""

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mergestream.cli.app import main
from mergestream.serving import tracing
from mergestream.serving.replicas import engine_process


class Stopwatch:
    """Sums of seconds and counts by span."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self._lock = threading.Lock()

    @contextmanager
    def start_as_current_span(self, name: str, **_: Any) -> Iterator["Stopwatch"]:
        began = time.perf_counter()
        try:
            yield self
        finally:
            with self._lock:
                total = self.sums[name]
                total[0] += time.perf_counter() - began
                total[1] += 1

    def set_attributes(self, attributes: dict[str, Any]) -> None:
        pass


if __name__ == "__main__":
    file, watch = Path(sys.argv[1]), Stopwatch()
    of_engine = file.with_suffix(".engine")
    tracing._tracers[:] = [watch]
    sys.argv[1:] = sys.argv[2:]
    if sys.argv[1] == "engine":
        engine_process.main(*map(int, sys.argv[2:]))
        file.write_text(json.dumps(watch.sums))
    else:
        engine_process.COMMAND[1:] = [__file__, str(of_engine), "engine"]
        try:
            main()
        finally:
            file.write_text(json.dumps(json.loads(of_engine.read_text()) | watch.sums))
