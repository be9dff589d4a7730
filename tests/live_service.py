"""`mergestream serve` in a process of its own, for suites that load it, kill it or lie to it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

STARTED_WITHIN = 120.0


def engine_of(service: int) -> int:
    """The engine's process among the children of a service's."""
    lists = (file.read_text() for file in Path(f"/proc/{service}/task").glob("*/children"))
    children = [int(word) for listed in lists for word in listed.split()]
    (engine,) = (each for each in children if b"engine_process" in Path(f"/proc/{each}/cmdline").read_bytes())
    return engine


class LiveService:
    """A service over a pool on disk; `with` starts it, waits until it is ready and ends it with SIGTERM."""

    def __init__(self, folder: Path, pool: Path, *more: str, prefix: Sequence[str] = (), **environment: str) -> None:
        """`prefix`: a command that runs the service's own, such as unshare."""
        self.state, self.log = folder / "state", folder / "state" / "audit.jsonl"
        self.said = folder / "said.txt"
        line = [sys.executable, "-m", "mergestream", "serve", str(pool), "--port", "0", "--rate", "0"]
        line += ["--abstain-on", "none"]  # pictures of the suites are noise
        self._line = [*prefix, *line, "--state", str(self.state), *more]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "LiveService":
        with self.said.open("wb") as output:
            self.process = subprocess.Popen(
                self._line, stderr=output, stdout=output, env=self._environment, start_new_session=True
            )
        ends = time.monotonic() + STARTED_WITHIN
        while not self.url and time.monotonic() < ends and self.process.poll() is None:
            time.sleep(0.05)
            ready = [line for line in self.said.read_text().splitlines() if line.startswith("Ready: ")]
            self.url = ready[0].split()[1] if ready else ""
        assert self.url, self.said.read_text()
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def engine(self) -> int:
        """The process that takes the steps and writes the log."""
        return engine_of(self.pid)

    def kill(self) -> None:
        """As a power cut would."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.url = ""

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.url = ""
        return self.process.wait(60)

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **more)

    def __enter__(self) -> "LiveService":
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Whatever is left of it, what a `prefix` started too."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Senders:
    """Clients in threads that post pictures and keep every answer they get, until they are told to stop."""

    def __init__(self, service: LiveService, pictures: list[bytes], streams: int = 3, threads: int = 8) -> None:
        self.answers: list[dict[str, Any]] = []
        self.problems: list[httpx.Response] = []
        self._service, self._pictures, self._streams = service, pictures, streams
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(number,)) for number in range(threads)]

    def start(self) -> "Senders":
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, answers: int, within: float = 60.0) -> None:
        ends = time.monotonic() + within
        while len(self.answers) < answers:
            assert time.monotonic() < ends, f"only {len(self.answers)} answers in time"
            time.sleep(0.01)

    def _send(self, number: int) -> None:
        """Singles and batches by turns; a connection that breaks ends it."""
        with self._service.client() as client:
            while not self._ended.is_set():
                picture = self._pictures[number % len(self._pictures)]
                door, count = ("images", 1) if number % 2 else ("batches", 2)
                files = [("images", ("a.png", picture, "image/png"))] * count
                try:
                    response = client.post(f"/v1/streams/site-{number % self._streams}/{door}", files=files)
                except httpx.TransportError:
                    return
                if response.status_code == 200:
                    self.answers.append(response.json())
                else:
                    self.problems.append(response)
                number += 7
