"""Received objects on disk until they are answered. A kill loses no object whose sender was told of success.

An object is a file named by a hash of its identifier, transfer syntax and data set, so an object that is sent twice is
one file. It is flushed to the disk before its sender is told of success; or, with `flush: association`, it is written
then, which survives a kill, and flushed within a second and before an association is released.
A file that a kill or a power cut has left incomplete has another hash than its name, and is dropped.
"""

import ctypes
import hashlib
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from mergestream.data.intake.limits import IntakeError
from mergestream.runtime.errors import OutputError
from mergestream.runtime.files import error_text, lock_or_refuse, make_folder, write_json
from mergestream.serving.dicom_network.answered_objects import AnsweredObjects
from mergestream.serving.dicom_network.routing_header import WINDOW, RoutingHeader, read_routing_header

ENDING, PARTIAL = ".dcm", ".part"
PREAMBLE = bytes(128) + b"DICM"
IMPLEMENTATION_UID, IMPLEMENTATION_NAME = "2.25.267123908741935530913837462910233847219", "MERGESTREAM"
MOST_REFUSED_BYTES = 1 << 30


class InboxFullError(OutputError):
    """The inbox has reached its size; senders may try again later."""


@dataclass(frozen=True, repr=False, eq=False)
class Received:
    """An object in the inbox; equal to itself only."""

    file: Path
    size: int
    header: RoutingHeader
    arrived: float  # by the clock of time.time

    @cached_property
    def digest(self) -> str:
        return self.file.stem


class Inbox:
    """The folders `inbox` and `refused` below `folder`. Safe to use from several threads, for one process."""

    def __init__(self, folder: Path, most_bytes: int, most_objects: int) -> None:
        self.folder, self._refused = make_folder(folder / "inbox"), make_folder(folder / "refused")
        for each in (folder, self.folder, self._refused):
            each.chmod(0o700)
        others = f"{folder} is used by another mergestream process. Stop it, or choose another --state folder."
        self._lock_handle = lock_or_refuse(folder / ".lock", OutputError(others))
        self.answered = AnsweredObjects(folder / "answered.txt")
        self._most_bytes, self._most_objects = most_bytes, most_objects
        self._lock = threading.Lock()
        self._waiting: dict[str, Received] = {}
        self._bytes = 0
        self._folder_handle = os.open(self.folder, os.O_RDONLY)
        self.dropped_at_start = self._restore()

    def _restore(self) -> int:
        """List what an earlier process left; return how many incomplete files were dropped."""
        dropped = 0
        for file in sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
            try:
                self._insert(read_received(file))
            except (IntakeError, ValueError):
                file.unlink()
                dropped += file.suffix == ENDING
        return dropped

    def new_file(self, transfer_syntax: str, sop_class: str, sop_instance: str, calling: str) -> "IncomingFile":
        """A file for an object that begins to arrive. InboxFullError: there is no room."""
        with self._lock:
            if self._bytes >= self._most_bytes or len(self._waiting) >= self._most_objects:
                raise InboxFullError("The inbox is full. Send the object again later.")
        try:
            return IncomingFile(self.folder, transfer_syntax, sop_class, sop_instance, calling)
        except OSError as error:
            raise OutputError(f"Cannot write to {self.folder}: {error_text(error)}.") from error

    def store(self, incoming: "IncomingFile", received: Received, *, flushed: bool = True) -> None:
        """Keep a complete object. An object that was answered or is waiting already is not kept twice.

        `flushed`: it is on disk when this returns, else after the next `flush`.
        """
        with self._lock:
            is_new = received.digest not in self._waiting and received.digest not in self.answered
        if not is_new:
            incoming.discard()
            return
        try:
            incoming.keep(self._folder_handle if flushed else None)
        except OSError as error:
            raise OutputError(f"Cannot write to {self.folder}: {error_text(error)}.") from error
        self._insert(received)

    def flush(self) -> None:
        """Write to disk all objects that were stored without."""
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "syncfs"):
            os.sync()
        elif library.syncfs(self._folder_handle):
            raise OutputError(f"Cannot write to {self.folder}: {os.strerror(ctypes.get_errno())}.")

    def _insert(self, received: Received) -> None:
        with self._lock:
            if received.digest not in self._waiting:
                self._waiting[received.digest] = received
                self._bytes += received.size

    def waiting(self) -> list[Received]:
        """Objects that are not answered, in the order of their arrival."""
        with self._lock:
            return list(self._waiting.values())

    def __contains__(self, each: Received) -> bool:
        return each.digest in self._waiting

    def numbers(self) -> tuple[int, int, float]:
        """Waiting objects, their bytes, and the age of the oldest in seconds."""
        with self._lock:
            oldest = next(iter(self._waiting.values()), None)
            return len(self._waiting), self._bytes, 0.0 if oldest is None else max(0.0, time.time() - oldest.arrived)

    def finish(self, objects: Iterable[Received]) -> None:
        """Remember that objects were answered and delivered, then remove them."""
        done = list(objects)
        self.answered.add([each.digest for each in done])
        for each in done:
            each.file.unlink(missing_ok=True)
            self._remove(each)

    def refuse(self, each: Received, code: str, sentence: str) -> None:
        """Move an object that cannot be answered to `refused`, with the reason beside it."""
        target = self._refused / each.file.name
        write_json(target.with_suffix(".reason.json"), {"code": code, "reason": sentence})
        each.file.replace(target)
        self._remove(each)
        self._limit_refused()

    def _limit_refused(self) -> None:
        """Delete the oldest refused objects beyond a gibibyte."""
        files = sorted(self._refused.glob(f"*{ENDING}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        total = 0
        for file in files:
            total += file.stat().st_size
            if total > MOST_REFUSED_BYTES:
                file.unlink(missing_ok=True)
                file.with_suffix(".reason.json").unlink(missing_ok=True)

    def _remove(self, each: Received) -> None:
        with self._lock:
            if self._waiting.pop(each.digest, None) is not None:
                self._bytes -= each.size

    def close(self) -> None:
        os.close(self._folder_handle)
        os.close(self._lock_handle)


class IncomingFile:
    """An object that arrives in pieces: in memory up to `WINDOW` bytes, a larger one goes straight to disk."""

    def __init__(self, folder: Path, transfer_syntax: str, sop_class: str, sop_instance: str, calling: str) -> None:
        self._folder, self._transfer_syntax, self._calling = folder, transfer_syntax, calling
        self._identity = (sop_class, sop_instance)
        self._start = bytearray(PREAMBLE + _file_meta(transfer_syntax, sop_class, sop_instance, calling))
        self._head_bytes = len(self._start)
        self._hash = _digest_of(sop_instance, transfer_syntax)
        self.size = 0  # of the data set
        self._path: Path | None = None
        self._file: BinaryIO | None = None

    def write(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self.size += len(data)
        if self._file is not None:
            self._file.write(data)
            return
        self._start += data
        if self.size >= WINDOW:
            self._spill()

    def _spill(self) -> None:
        self._begin(self._folder / f"{secrets.token_hex(8)}{PARTIAL}")

    def _begin(self, path: Path) -> None:
        """Write what has arrived to a new file."""
        self._file, self._path = path.open("xb"), path
        self._file.write(self._start)

    def received(self) -> Received:
        """Check the complete object. IntakeError: it is damaged, or it is not the announced one."""
        start = bytes(memoryview(self._start)[self._head_bytes : self._head_bytes + WINDOW])
        header = read_routing_header(start, self.size, self._transfer_syntax, self._calling)
        if (header.sop_class, header.sop_instance) != self._identity:
            raise MismatchError()
        return Received(self._target(), self._head_bytes + self.size, header, time.time())

    def _target(self) -> Path:
        return self._folder / f"{self._hash.hexdigest()}{ENDING}"

    def keep(self, folder_handle: int | None) -> None:
        """Give the file its name, and flush it together with its folder, if that is given."""
        target = self._target()
        if self._file is None:
            try:
                self._begin(target)  # if a kill cuts the file off, its hash differs from its name
            except FileExistsError:  # the same object arrives twice at a time
                self._spill()
        assert self._file is not None
        assert self._path is not None
        self._file.flush()
        # Renamed first: flushing the file then writes its name to the disk as well on most file systems, and flushing
        # the folder costs next to nothing.
        if self._path != target:
            self._path.replace(target)
        if folder_handle is not None:
            os.fsync(self._file.fileno())
            os.fsync(folder_handle)
        self._file.close()

    def discard(self) -> None:
        if self._file is not None and self._path is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)


class MismatchError(IntakeError):
    """The data set is of another class or instance than its sender announced."""

    def __init__(self) -> None:
        super().__init__("damaged", "The data set is of another SOP class or instance than was announced.")


def read_received(file: Path) -> Received:
    """Read a file of the inbox. IntakeError, ValueError: it is incomplete or no object."""
    data = file.read_bytes()
    meta, start = read_file_meta(data)
    digest = _digest_of(meta[0x0003], meta[0x0010])
    digest.update(memoryview(data)[start:])
    if file.suffix != ENDING or digest.hexdigest() != file.stem:
        raise ValueError("incomplete")
    window = data[start : start + WINDOW]
    header = read_routing_header(window, len(data) - start, meta[0x0010], meta.get(0x0016, ""))
    return Received(file, len(data), header, file.stat().st_mtime)


def _digest_of(sop_instance: str, transfer_syntax: str) -> "hashlib._Hash":
    return hashlib.sha256(f"{sop_instance}\n{transfer_syntax}\n".encode())


def _file_meta(transfer_syntax: str, sop_class: str, sop_instance: str, calling: str) -> bytes:
    """File meta information (PS3.10 7.1), with the sender's AE title as the source."""
    texts = (
        (0x0002, b"UI", sop_class), (0x0003, b"UI", sop_instance), (0x0010, b"UI", transfer_syntax),
        (0x0012, b"UI", IMPLEMENTATION_UID), (0x0013, b"SH", IMPLEMENTATION_NAME), (0x0016, b"AE", calling),
    )  # fmt: skip
    body = struct.pack("<HH2sHIH", 2, 1, b"OB", 0, 2, 0x0100)
    for element, kind, text in texts:
        value = text.encode("ascii")
        value += (b"\0" if kind == b"UI" else b" ") * (len(value) % 2)
        body += struct.pack("<HH2sH", 2, element, kind, len(value)) + value
    return struct.pack("<HH2sHI", 2, 0, b"UL", 4, len(body)) + body


def read_file_meta(data: bytes) -> tuple[dict[int, str], int]:
    """Texts of the file meta information by element number, and where the data set begins. ValueError: damaged."""
    if data[128:132] != b"DICM":
        raise ValueError("no DICOM file")
    position, texts = 132, dict[int, str]()
    try:
        while data[position : position + 2] == b"\x02\0":
            element, kind, length = struct.unpack_from("<H2sH", data, position + 2)
            position += 8
            if kind in (b"OB", b"UN", b"OW"):
                length, position = struct.unpack_from("<I", data, position)[0], position + 4
            elif kind in (b"UI", b"AE", b"SH"):
                texts[element] = data[position : position + length].decode("ascii").strip(" \0")
            position += length
        texts[0x0002], texts[0x0003], texts[0x0010]
    except (struct.error, KeyError, UnicodeDecodeError):
        raise ValueError("damaged file meta information") from None
    return texts, position
