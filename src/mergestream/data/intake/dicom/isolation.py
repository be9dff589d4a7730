"""JPEG frames decoded in processes apart, with a limit on their memory and time: a crash there is a refusal here."""

import atexit
import os
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from mergestream.data.intake.dicom import decoder_process
from mergestream.data.intake.dicom.decoder_process import read_message, write_message
from mergestream.data.intake.limits import Allowance, too_slow
from mergestream.data.intake.refusals import IntakeError
from mergestream.runtime.errors import WorkerError

PROGRAM = Path(decoder_process.__file__)
# Python, NumPy and the decoders themselves; most of it is mapped and never touched.
OWN_BYTES = 1 << 30
# Input, output and what decoders keep between: JPEG 2000 works on 32-bit numbers, three a colour pixel.
BYTES_A_PIXEL = 40
# What a Python started by hand or by a cluster may need to find its libraries.
ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL")


class Decoders:
    """As many processes as cores, started when needed. Safe to use from several threads."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._idle: list[_Process] = []
        self._slots = threading.BoundedSemaphore(os.cpu_count() or 1)
        atexit.register(self.close)

    def decode(self, options: dict[str, Any], frame: bytes, allowance: Allowance) -> tuple[np.ndarray, str]:
        """Pixels [H,W] or [H,W,3] of one frame, and the colour they are in."""
        if not self._slots.acquire(timeout=allowance.seconds_left()):
            raise too_slow(allowance.limits)
        try:
            process = self._running() or _Process(self._memory_bytes)
            answer = process.ask(options, frame, allowance)
            if process.usable:
                self._idle.append(process)
        finally:
            self._slots.release()
        if answer is None or "failed" in answer[0]:
            raise IntakeError("damaged", "A compressed frame of the DICOM file is damaged and cannot be decoded.")
        head, body = answer
        return np.frombuffer(body, dtype=head["dtype"]).reshape(head["shape"]), head["colour"]

    def _running(self) -> "_Process | None":
        """An idle process; one that somebody ended meanwhile is not a client's fault."""
        while (process := self._taken()) is not None:
            if process.running():
                return process
        return None

    def _taken(self) -> "_Process | None":
        try:
            return self._idle.pop()
        except IndexError:  # asked for, not looked up first: another thread may take the last one in between
            return None

    def close(self) -> None:
        while (process := self._taken()) is not None:
            process.close()


@cache
def _decoders(memory_bytes: int, process_id: int) -> Decoders:  # noqa: ARG001  a forked process must start its own
    return Decoders(memory_bytes)


def decoders(pixels: int) -> Decoders:
    """The processes that decode images of at most so many pixels."""
    return _decoders(OWN_BYTES + BYTES_A_PIXEL * pixels, os.getpid())


class _Process:
    """One decoder; used by one thread at a time."""

    def __init__(self, memory_bytes: int) -> None:
        # Nothing of the service's settings, which may hold keys, goes along. Threads of BLAS would map much memory.
        known = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        settings = {**known, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", str(PROGRAM), str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=settings,
        )
        self._input, self._output = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self.usable = True

    def ask(self, options: dict[str, Any], frame: bytes, allowance: Allowance) -> tuple[dict[str, Any], bytes] | None:
        """The answer; None where the process died of the question. One that takes too long is killed."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(allowance.seconds_left(), end)
        timer.daemon = True
        timer.start()
        try:
            answer = self._exchange(options, frame)
        except OSError:
            answer = None
        finally:
            timer.cancel()
        if answer is None or answer[0]["retire"] or late.is_set():
            self.close()
        if answer is None and late.is_set():
            raise too_slow(allowance.limits)
        if not self._ready:
            raise WorkerError(f"The decoder of compressed DICOM does not start. Try it: {sys.executable} {PROGRAM} 0.")
        return answer

    _ready = False

    def _exchange(self, options: dict[str, Any], frame: bytes) -> tuple[dict[str, Any], bytes] | None:
        if not self._ready:
            self._ready = read_message(self._output) is not None
        if not self._ready:
            return None
        write_message(self._input, options, frame)
        return read_message(self._output)

    def running(self) -> bool:
        if self._process.poll() is not None:
            self.close()
        return self.usable

    def close(self) -> None:
        self.usable = False
        self._process.kill()
        self._process.wait()
        for pipe in (self._input, self._output):
            with suppress(OSError):  # what was still to be written has nowhere to go
                pipe.close()
