"""A real service in a process of its own, for the suites that talk HTTP to it."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import torch
from PIL import Image

import mergestream as ms
from dicoms import dicom
from mergestream.serving.engine.answers import Answer

STREAMS = "/v1/streams"
ANSWER = Answer(
    stream="ward",
    step=0,
    classes=("benign", "malignant, naïve µ"),
    predictions=("malignant, naïve µ",),
    probabilities=((0.123456789012345, 0.876543210987655),),
    experts=("lyon", "brest"),
    switched_off=(),
    encoder_coefficients=[1.0, 3.5e-17],
    head_coefficients=[1.0, 0.0],
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
        line += ["--guard", "fallback=none", *more]  # noise is answered by the method, as in the Python interface
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
