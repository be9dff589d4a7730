"""A stand-in for the service, for what a real one cannot be made to answer: hostile names, refusals, many experts."""

import json
import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mergestream

FOLDER = Path(mergestream.__file__).parent / "serving" / "dashboard"
POLICY = "default-src 'self'; frame-ancestors 'none'"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass
class StandIn:
    """What the service answers, to be changed at any time; `changes` are the requests that are not for data."""

    experts: list[str]
    classes: list[str]
    streams: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    off: set[str] = field(default_factory=set)
    token: str | None = None
    unknown: set[str] = field(default_factory=set)  # streams whose alarms are unknown since a restart
    acknowledged: dict[str, str] = field(default_factory=dict)  # stream -> the person
    refusal: tuple[int, dict[str, str]] | None = None  # of every change
    changes: list[tuple[str, str, Any]] = field(default_factory=list)
    version: str = "0.1.0"
    extra: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, Any] | None = None  # of every stream
    trust: dict[str, dict[str, str]] = field(default_factory=dict)  # expert -> signer, revocation

    def add_step(self, stream: str, seed: int = 0, findings: list[dict[str, str]] | None = None) -> None:
        steps = self.streams.setdefault(stream, [])
        steps.append(made_up_step(len(steps), self.experts, self.classes, seed, findings or []))

    def overview(self) -> dict[str, Any]:
        cards = [
            {"name": name, "on": name not in self.off, "domain": name, "metrics": {"validation": {"accuracy": 0.93}},
             **self.trust.get(name, {})}
            for name in self.experts
        ]  # fmt: skip
        return {
            "pool": {"hash": "5f" * 32, "classes": self.classes, "experts": cards},
            "streams": [self._status(name, steps) for name, steps in self.streams.items()],
            "latency_ms": {"p50": 8.1, "p95": 12.4, "p99": 21.9},
            "requests": {"answered": sum(map(len, self.streams.values())), "refused": 2, "failed": 0},
            "version": self.version,
            **self.extra,
        }

    def _status(self, name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
        last = steps[-1]
        coefficients = last["encoder_coefficients"]
        person = self.acknowledged.get(name)
        details = {"step": last["step"], "since": "2026-11-16T08:15:00.000000Z", "next": "Check the scanner."}
        details |= {"acknowledged_by": person, "acknowledged_at": person and "2026-11-16T08:20:00.000000Z"}
        return {
            "name": name,
            "steps": len(steps),
            "images": sum(step["images"] for step in steps),
            "last_step_at": last["time"],
            "encoder_coefficients": coefficients,
            "head_expert": max(coefficients, key=coefficients.__getitem__) if coefficients else None,
            "alarms": None if name in self.unknown else [finding | details for finding in last["findings"]],
        }


def made_up_step(
    number: int, experts: list[str], classes: list[str], seed: int, findings: list[dict[str, str]]
) -> dict[str, Any]:
    """Coefficients that wander, as on a stream whose domain changes slowly."""
    dice = random.Random(1000 * seed + number)
    wave = [math.sin(number / 17 + 2 * k + seed) + dice.gauss(0, 0.08) for k in range(len(experts))]
    evidence = [math.exp(1.6 * value) for value in wave]
    shares = {name: value / sum(evidence) for name, value in zip(experts, evidence, strict=True)}
    answers = dice.choices(classes, weights=[1 / (place + 1) for place in range(len(classes))], k=32)
    limit = math.log(len(classes))
    return {
        "step": number,
        "time": time.time(),
        "images": 32,
        "encoder_coefficients": shares,
        "head_coefficients": {name: value**2 / sum(v**2 for v in shares.values()) for name, value in shares.items()},
        "entropies": {name: limit * (0.75 - 0.6 * value) for name, value in shares.items()},
        "predictions_per_class": {name: answers.count(name) for name in classes},
        "findings": findings,
        "milliseconds": 7 + dice.expovariate(0.6),
    }


@contextmanager
def served(standin: StandIn) -> Iterator[str]:
    """The address of the dashboard over the stand-in, while the block lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(standin))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(standin: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Security-Policy", POLICY)
            self.end_headers()
            self.wfile.write(content)

        def _json(self, value: Any, status: int = 200) -> None:
            kind = "application/json" if status == 200 else "application/problem+json"
            self._send(status, json.dumps(value).encode(), kind)

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if not path.startswith("/v1/"):
                return self._file(path.strip("/") or "index.html")
            if standin.token is not None and self.headers.get("Authorization") != f"Bearer {standin.token}":
                return self._json({"title": "Token needed", "detail": "Send one.", "code": "unauthorised"}, 401)
            if path == "/v1/overview":
                return self._json(standin.overview())
            after = int(query.removeprefix("after=") or -1)
            for name, steps in list(standin.streams.items()):
                if path == f"/v1/streams/{_quoted(name)}/recent":
                    newer = [step for step in steps if step["step"] > after]
                    return self._json({"stream": name, "steps": newer[-200:], "quality": standin.quality})
            return self._json({"title": "No such stream", "code": "unknown_name"}, 404)

        def _file(self, name: str) -> None:
            file = FOLDER / name
            if FOLDER not in file.resolve().parents or not file.is_file():
                return self._json({"title": "Not found"}, 404)
            return self._send(200, file.read_bytes(), TYPES[file.suffix])

        def _change(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            standin.changes.append((self.command, self.path, body))
            if standin.refusal is not None:
                return self._json(standin.refusal[1], standin.refusal[0])
            if self.path.endswith("/acknowledge"):
                standin.acknowledged[self.path.split("/")[-2]] = body["name"]
            return self._json({})

        do_POST = do_PUT = do_DELETE = do_PATCH = _change

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="!~*'()")
