"""DICOM files decoded in child processes with limited memory and time: a crash there is a refusal here."""

import atexit
import hashlib
import os
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from mergestream.data.intake.dicom import decoder_process
from mergestream.data.intake.dicom.decoder_process import read_message, write_message
from mergestream.data.intake.limits import Allowance, IntakeError, Limits, too_slow
from mergestream.data.intake.pictures import DicomSource, Picture, picture_of
from mergestream.data.intake.shades import three_channels
from mergestream.runtime.errors import WorkerError

PROGRAM = Path(decoder_process.__file__)
# Python, NumPy and the decoders themselves; most of it is mapped and never touched.
OWN_BYTES = 1 << 30
# The file, the data set once inflated, and the pixels as stored.
COPIES_OF_THE_FILE = 3
# Working memory: JPEG 2000 needs three 32-bit numbers per colour pixel, a window a few 64-bit ones per pixel.
BYTES_PER_PIXEL = 40
MOST_HEAD_BYTES = 1 << 16
# What a Python started by hand or by a cluster may need to find its libraries.
ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL")


class DecoderPool:
    """As many processes as cores, started when needed. Safe to use from several threads."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._idle: list[DecoderProcess] = []
        self._slots = threading.BoundedSemaphore(os.cpu_count() or 1)
        atexit.register(self.close)

    def decode(self, data: bytes, allowance: Allowance) -> tuple[list[str], list[np.ndarray]]:
        """A file's UIDs, and its frames uint8 [H,W] or [H,W,3]."""
        if not self._slots.acquire(timeout=allowance.seconds_left()):
            raise too_slow(allowance.limits)
        try:
            process = self._running_process() or DecoderProcess(self._memory_bytes)
            answer = process.ask(data, allowance)
            if process.usable:
                self._idle.append(process)
        finally:
            self._slots.release()
        end, frames = answer or ({}, [])
        if "refusal" in end:
            raise IntakeError(*end["refusal"])
        if not frames:
            raise IntakeError("damaged", "The DICOM file is damaged and cannot be decoded.")
        return end["identifiers"], frames

    def _running_process(self) -> "DecoderProcess | None":
        """An idle process that still runs, if any; one may have been killed in the meantime."""
        with suppress(IndexError):  # no check first: another thread may take the last one in between
            while not (process := self._idle.pop()).running():
                pass
            return process
        return None

    def close(self) -> None:
        while (process := self._running_process()) is not None:
            process.close()


@cache
def _pool(memory_bytes: int, process_id: int) -> DecoderPool:  # noqa: ARG001  a forked process must start its own
    return DecoderPool(memory_bytes)


def pool_for(limits: Limits) -> DecoderPool:
    """The processes that have enough memory for files within these limits."""
    return _pool(memory_bytes(limits), os.getpid())


def memory_bytes(limits: Limits) -> int:
    return OWN_BYTES + COPIES_OF_THE_FILE * limits.file_bytes + BYTES_PER_PIXEL * limits.pixels


Answer = tuple[dict[str, Any], list[np.ndarray]]  # the last message, and the frames before it


class DecoderProcess:
    """One child process; used by one thread at a time."""

    def __init__(self, memory_bytes: int) -> None:
        # Nothing of the service's settings, which may hold keys, goes along. Threads of BLAS would map much memory.
        inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        settings = {**inherited, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", str(PROGRAM), str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=settings,
        )
        self._input, self._output = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self.usable = True

    def ask(self, data: bytes, allowance: Allowance) -> Answer | None:
        """The answer; None if the process died of the file. One that takes too long is killed."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(allowance.seconds_left(), end)
        timer.daemon = True
        timer.start()
        try:
            answer = self._exchange(data, allowance)
        except (OSError, ValueError):
            answer = None
        finally:
            timer.cancel()
        if answer is None or answer[0]["retire"] or late.is_set():
            self.close()
        if answer is None and late.is_set():
            raise too_slow(allowance.limits)
        if not self._ready:
            raise WorkerError(f"The decoder of DICOM files does not start. Try it: {sys.executable} {PROGRAM} 0.")
        return answer

    _ready = False

    def _exchange(self, data: bytes, allowance: Allowance) -> Answer | None:
        if not self._ready:
            self._ready = read_message(self._output, MOST_HEAD_BYTES) is not None
        if not self._ready:
            return None
        write_message(self._input, allowance.to_json(), data)
        frames, most = list[np.ndarray](), 3 * allowance.limits.pixels + MOST_HEAD_BYTES
        while (message := read_message(self._output, most)) is not None and len(frames) <= allowance.limits.frames:
            head, body = message
            if "shape" not in head:
                return head, frames
            frames.append(np.frombuffer(body, np.uint8).reshape(head["shape"]))
        return None

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


def read_dicom(data: bytes, allowance: Allowance) -> list[Picture]:
    """Decode a file that has its preamble."""
    if find_spec("pydicom") is None:
        raise IntakeError("decoder_missing", "The service cannot read DICOM: pip install 'mergestream[serve]'.")
    identifiers, frames = pool_for(allowance.limits).decode(data, allowance)
    allowance.take(len(frames), *frames[0].shape[:2])
    sha256, source = hashlib.sha256(data).hexdigest(), DicomSource(*identifiers)
    return [
        picture_of(three_channels(frame), sha256, number if len(frames) > 1 else None, source)
        for number, frame in enumerate(frames, start=1)
    ]
