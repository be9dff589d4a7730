"""Services for the suites that talk HTTP: in a thread of this process, or in a process of their own."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import httpx
import numpy as np
import torch
from PIL import Image

import mergestream as ms
from dicoms import dicom
from mergestream.serving import startup
from mergestream.serving.engine.answers import Answer
from mergestream.serving.http import server
from mergestream.serving.log_lines import JsonFormatter
from mergestream.serving.options import ServeOptions

STREAMS = "/v1/streams"
ANSWER = Answer(
    stream="ward",
    step=0,
    classes=("benign", "malignant, naïve µ"),
    predictions=("malignant, naïve µ",),
    probabilities=((0.123456789012345, 0.876543210987655),),
    switched_off=(),
    encoder_coefficients={"lyon": 1.0, "brest": 3.5e-17},
    head_coefficients={"lyon": 1.0, "brest": 0.0},
    entropy=None,
    consistency=None,
    head_expert="lyon",
    pool_sha256="a" * 64,
    weights_sha256="b" * 64,
    findings=(),
    abstention=None,
    audit={},
    seconds=0.0,
    batch_size=1,
)


class RunningService:
    """`mergestream serve` on a free port; `with` ends it with SIGTERM and waits."""

    def __init__(self, pool: Path, state: Path, *more: str, wait: bool = True, **variables: str) -> None:
        self.state, self.log = state, state / "audit.jsonl"
        line = [sys.executable, "-m", "mergestream", "serve", str(pool), "--state", str(state), "--port", "0"]
        line += [
            "--guard",
            "fallback=none",
            "--abstain-on",
            "none",
            *more,
        ]  # noise is answered by the method, as in the Python interface
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        self.process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment)
        self.said: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            assert self._ready.wait(180), self.words()
            assert self.url, self.words()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if line.startswith("Ready: "):
                self.url = line.split()[1]
                self._ready.set()
        self._ready.set()

    def words(self) -> str:
        return "".join(self.said)

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **more)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    def lines(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if kind in (None, line["kind"])]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()


class LocalService:
    """`serve` in a thread of this process, on a free port: starts in a fraction of a second."""

    def __init__(self, pool: Path, state: Path, **options: Any) -> None:
        self.state, self.log, self.url = state, state / "audit.jsonl", ""
        self.said: list[str] = []
        self._servers: list[server.Server] = []
        self._failures: list[BaseException] = []
        self._ready = threading.Event()
        self._handler = _Lines(self.said, as_json=options.get("json_log", False))
        logging.getLogger("mergestream.serving").addHandler(self._handler)
        logging.getLogger("mergestream.serving").setLevel(logging.INFO)
        chosen = ServeOptions(
            pool, port=0, state=state, **{"guards": ("fallback=none",), "abstain_on": "none", **options}
        )
        self._thread = threading.Thread(target=self._serve, args=(chosen,), daemon=True)
        servers = self._servers

        class Recorded(server.Server):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                servers.append(self)

        with patch.object(server, "Server", Recorded), patch.object(startup, "log_to_stderr", lambda as_json: None):
            self._thread.start()
            assert self._ready.wait(60), self.words()
        assert self.url, self._failures

    def _serve(self, options: ServeOptions) -> None:
        try:
            startup.serve(options, self._say, own_process=False)
        except BaseException as error:
            self._failures.append(error)
        self._ready.set()

    def _say(self, line: str) -> None:
        self.said.append(f"{line}\n")
        if line.startswith("Ready: "):
            self.url = line.split()[1]
            self._ready.set()

    def words(self) -> str:
        return "".join(self.said)

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **more)

    def stop(self) -> int:
        self._servers[0].should_exit = True
        self._thread.join(60)
        logging.getLogger("mergestream.serving").removeHandler(self._handler)
        return len(self._failures)

    def lines(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if kind in (None, line["kind"])]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Lines(logging.Handler):
    """Adds log lines to a list."""

    def __init__(self, lines: list[str], *, as_json: bool) -> None:
        super().__init__()
        self._lines = lines
        self.setFormatter(JsonFormatter() if as_json else logging.Formatter("%(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{self.format(record)}\n")


def pixels(seed: int, size: int = 16) -> np.ndarray:
    """A picture [H,W,3]."""
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def encoded(array: np.ndarray, form: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, form, **more)
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def png(seed: int, size: int = 16) -> bytes:
    return encoded(pixels(seed, size))


def colour_dicom(seed: int) -> bytes:
    return dicom(pixels(seed))


def form(*files: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    """The field `images` as httpx takes it; the names must never come back."""
    return [("images", (f"SECRET^patient-{number}.png", data)) for number, data in enumerate(files)]


def tensor(*arrays: np.ndarray) -> torch.Tensor:
    """uint8 [B,3,H,W] of pictures [H,W,3]."""
    return torch.stack([torch.from_numpy(array).permute(2, 0, 1) for array in arrays])


def direct(pool: Path, **options: Any) -> ms.Method:
    """The same method through the Python interface."""
    return ms.create_method("entropy_adaptive", ms.ExpertPool.load(pool), **options)


def probabilities(step: ms.Step) -> list[list[float]]:
    return torch.softmax(step.logits, dim=-1).tolist()
