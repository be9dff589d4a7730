"""Files of clients decoded in child processes with limited memory, time and rights: a crash there is a refusal here."""

import atexit
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from mergestream.data.intake import decoder_process
from mergestream.data.intake.decoder_process import read_message, write_message
from mergestream.data.intake.limits import Allowance, IntakeError, Limits, damaged_file
from mergestream.runtime.errors import WorkerError
from mergestream.runtime.messages import log_once

PROGRAM = Path(decoder_process.__file__)
# Python, NumPy and the decoders themselves; most of it is mapped and never touched.
OWN_BYTES = 1 << 30
# The file, the data set once inflated, and the pixels as stored.
COPIES_OF_THE_FILE = 3
# Working memory: JPEG 2000 needs three 32-bit numbers per colour pixel, a window a few 64-bit ones per pixel.
BYTES_PER_PIXEL = 40
# A process may use this many times the time allowed for one file; at half of it, it is replaced.
LIFETIME = 100
# What a Python started by hand or by a cluster may need to find its libraries.
ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL")
# After this share of its time a file moves to a slow place; while none is free, it may take the second share at most.
QUICK_SHARE, SHARE_WITHOUT_PLACE = 0.05, 0.25
# Quick places, and as many slow ones.
PLACES = max(4, 2 * (os.cpu_count() or 1))
STARTING_SECONDS = 60.0  # for a process to start, on a machine that is busy; it does not count as decoding
PIPE_BYTES = 1 << 20
UNFILTERED = (
    "Decoders of clients' files run without a filter of system calls (seccomp) on this machine. Their memory, time and "
    "descriptors are limited."
)
LOOK_SECONDS = 0.05  # between two looks at the processes at work
Overdue = Callable[[float], str | None]  # seconds of a file so far -> why it must end, if it must
DecodedFile = tuple[list[str], list[np.ndarray]]  # UIDs of a DICOM object, else none; frames uint8 [H,W] or [H,W,3]
logger = logging.getLogger(__name__)


class EncodedFile(NamedTuple):
    """A file as received; its kind is 'DICOM' or Pillow's name of the format."""

    kind: str
    data: bytes


class DecoderPool:
    """Child processes, started when needed; each decodes one request at a time. Safe to use from several threads.

    A request first takes one of the quick places. A file that is not decoded soon moves to one of the slow places, with
    the lowest priority: so a few files that take their full time do not stop the others.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._idle: list[DecoderProcess] = []
        self._quick, self._slow = threading.BoundedSemaphore(PLACES), threading.BoundedSemaphore(PLACES)
        self._supervisor = Supervisor()
        atexit.register(self.close)

    def decode(self, files: Sequence[EncodedFile], allowance: Allowance) -> list[DecodedFile]:
        """Decode files in order. An error carries the position of its file."""
        limits = allowance.limits
        if not self._quick.acquire(timeout=limits.seconds):
            raise IntakeError("too_slow", f"No decoder was free for {limits.seconds:g} s. Send the file again later.")
        place = self._quick
        try:
            process = self._running_process() or DecoderProcess(self._memory_bytes, limits)

            def overdue(seconds: float) -> str | None:
                """Why a file that has been decoded for so long must end, if it must; may move it to a slow place."""
                nonlocal place
                if place is self._quick and seconds > QUICK_SHARE * limits.seconds and self._slow.acquire(False):
                    place = self._slow
                    self._quick.release()
                    process.lower_priority()
                if seconds > limits.seconds:
                    return f"Decoding the file took longer than the allowed {limits.seconds:g} s."
                if place is self._quick and seconds > SHARE_WITHOUT_PLACE * limits.seconds:
                    return "Decoding the file took long while other files did, too. Send it again later."
                return None

            try:
                with self._supervisor.watching(process, overdue):
                    return process.decode(files, allowance)
            finally:
                if process.running():
                    self._idle.append(process)
        finally:
            place.release()

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


class Supervisor:
    """One thread that looks at all processes at work, and ends those that take too long."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._at_work: dict[DecoderProcess, Overdue] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, process: "DecoderProcess", overdue: Overdue) -> Iterator[None]:
        with self._changed:
            if not self._at_work:
                self._changed.notify()
            self._at_work[process] = overdue
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="decoder-supervisor", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._changed:  # not while it is being looked at
                del self._at_work[process]

    def _look(self) -> None:
        while True:
            with self._changed:
                while not self._at_work:
                    self._changed.wait()
                for process, overdue in self._at_work.items():
                    process.end_if(overdue)
            time.sleep(LOOK_SECONDS)


@cache
def _pool(memory_bytes: int, process_id: int) -> DecoderPool:  # noqa: ARG001  a forked process must start its own
    return DecoderPool(memory_bytes)


def pool_for(limits: Limits) -> DecoderPool:
    """The processes that have enough memory for files within these limits."""
    memory_bytes = OWN_BYTES + COPIES_OF_THE_FILE * limits.file_bytes + BYTES_PER_PIXEL * limits.pixels
    return _pool(memory_bytes, os.getpid())


class DecoderProcess:
    """One child process; used by one thread at a time."""

    def __init__(self, memory_bytes: int, limits: Limits) -> None:
        # Nothing of the service's settings, which may hold keys, goes along. Threads of BLAS would map much memory.
        inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", str(PROGRAM), str(memory_bytes), str(int(LIFETIME * max(limits.seconds, 6)))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**inherited, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            pipesize=PIPE_BYTES,
            start_new_session=True,  # an interrupt at the terminal is for the service
        )
        self._input, self._output = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self._ready, self._in_step, self._lowered = False, True, False
        self._began, self._killed_for = math.inf, ""

    def decode(self, files: Sequence[EncodedFile], allowance: Allowance) -> list[DecodedFile]:
        """Decode files in order."""
        decoded = list[DecodedFile]()
        self._began = time.monotonic() + (0 if self._ready else STARTING_SECONDS)
        self._in_step = False
        try:
            self._send(files, allowance)
            for _ in files:
                self._began = time.monotonic()
                decoded.append(self._receive(allowance))
        except IntakeError as error:
            refusal = error
        except (OSError, ValueError, LookupError, TypeError):  # it died, or sent nonsense
            refusal = damaged_file(files[len(decoded)].kind)
        else:
            return decoded
        finally:
            self._began = math.inf  # too late to end it
            if not self._in_step or self._killed_for:
                self.close()
        if not self._ready:
            raise WorkerError(f"The decoder does not start. Try it: {sys.executable} {PROGRAM} 0 0.")
        refusal = IntakeError("too_slow", self._killed_for) if self._killed_for else refusal
        refusal.position = len(decoded)
        raise refusal

    def end_if(self, overdue: Overdue) -> None:
        """Kill the process if its file takes too long."""
        if not self._killed_for and (reason := overdue(time.monotonic() - self._began)):
            self._killed_for = reason
            self._process.kill()

    def _send(self, files: Sequence[EncodedFile], allowance: Allowance) -> None:
        if not self._ready:
            head, _ = read_message(self._output, 0) or ({}, b"")
            self._ready = head["ready"]
            if not head["filtered"]:
                log_once(logger, logging.WARNING, UNFILTERED)
        listed = [(file.kind, len(file.data)) for file in files]
        about = {**vars(allowance), "limits": vars(allowance.limits)}  # a quick `asdict`
        write_message(self._input, {**about, "files": listed}, *(file.data for file in files))

    def _receive(self, allowance: Allowance) -> DecodedFile:
        """The frames of the next file. Between files the process is in step: it may be used again after a refusal."""
        frames = list[np.ndarray]()
        self._in_step = False
        while True:
            head, body = read_message(self._output, 3 * allowance.limits.pixels) or ({}, b"")
            if "shape" not in head:
                break
            frame = np.frombuffer(body, np.uint8).reshape(head["shape"])
            if frame.ndim not in (2, 3) or frame.shape[2:] not in ((), (3,)):
                raise ValueError
            allowance.take(1, *frame.shape[:2])
            frames.append(frame)
        self._in_step = not head["retire"] and not self._lowered
        if "refusal" in head:
            code, sentence = head["refusal"]
            raise IntakeError(code, sentence)
        return head["identifiers"], frames

    def lower_priority(self) -> None:
        self._lowered = True
        with suppress(OSError):  # it may have ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)

    def running(self) -> bool:
        if self._process.poll() is None:
            return True
        self.close()
        return False

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._input, self._output):
            with suppress(OSError):  # what was still to be written has nowhere to go
                pipe.close()
