"""Atomic writes of files, folders and arrays; JSON, hashes and locks."""

import ctypes
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from mergestream.runtime.errors import CheckpointError, MergestreamError, MissingPathError, OutputError, TakenPathError


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_if_file(path: Path) -> str | None:
    """The hash of a file; None if it is missing."""
    return sha256_of_file(path) if path.is_file() else None


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Identifies a file, so that a replacement is noticed; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def sha256_of_json(value: Any) -> str:
    """Hash JSON content, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def make_folder(folder: Path) -> Path:
    """Create an output folder and check that it is writable, before any work starts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        kind = TakenPathError if isinstance(error, FileExistsError | NotADirectoryError) else OutputError
        raise kind(f"Cannot write to the folder {folder}: {error_text(error)}. Choose another one.") from error
    return folder


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then rename it to `path`; on any failure the old file stays."""
    temporary = _scratch_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Created with its mode, from which the kernel takes the umask: that is one for all threads of a process.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, 0o666))
        write(temporary)
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    except Exception as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, MergestreamError):
            raise
        # safetensors reports a full disk as an error of its own, not as OSError.
        raise OutputError(f"Cannot write {path}: {error_text(error)}. The old file, if any, is unchanged.") from error


@contextmanager
def atomic_folder(folder: Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield a scratch folder that replaces `folder` when the block ends without an error.

    An existing folder is replaced only if it is empty or `is_ours` recognises it: a wrong path must not cost data.
    """
    make_folder(folder.parent)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OutputError(f"{folder} is not a plain folder. Choose another path.")
    if folder.is_dir() and any(folder.iterdir()) and not is_ours(folder):
        raise OutputError(f"{folder} holds other files and is not replaced. Choose a new or empty folder.")
    scratch = _scratch_name(folder)
    try:
        scratch.mkdir()
    except OSError as error:
        raise OutputError(f"Cannot write to {folder.parent}: {error_text(error)}.") from error
    try:
        yield scratch
        flush(scratch)
        _swap_in(scratch, folder)
    finally:
        # After a swap this is the old folder; after a failure, the unfinished one.
        shutil.rmtree(scratch, ignore_errors=True)


def contains_only(folder: Path, names: set[str]) -> bool:
    """Whether the folder contains no other names than these."""
    return {path.name for path in folder.iterdir()} <= names


def _swap_in(scratch: Path, folder: Path) -> None:
    try:
        if not folder.exists():
            scratch.rename(folder)
        elif not _exchange(scratch, folder):
            old = folder.rename(_scratch_name(folder))
            try:
                scratch.rename(folder)
            except OSError:
                old.rename(folder)
                raise
            shutil.rmtree(old, ignore_errors=True)
        flush(folder.parent)
    except OSError as error:
        raise OutputError(f"Cannot replace {folder}: {error_text(error)}.") from error


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step, so that a killed process leaves the old or the new one. Linux only."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_working_folder, exchange = -100, 2
    arguments = (at_working_folder, os.fsencode(one), at_working_folder, os.fsencode(other), exchange)
    return rename is not None and rename(*arguments) == 0


def _scratch_name(path: Path) -> Path:
    """A new hidden name beside a file or folder."""
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file that must not exist yet, flushed to the disk."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"Cannot write {path}: {error_text(error)}.") from error


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def json_round_trip(value: dict[str, Any]) -> dict[str, Any]:
    """The value as reading its JSON gives it back: lists for tuples."""
    return dict(json.loads(json.dumps(value)))


def read_json(path: Path, schema_version: int, *, sha256: str | None = None) -> dict[str, Any]:
    """Read a JSON object and refuse any other schema version. `sha256`: what the bytes must hash to."""
    try:
        content = path.read_bytes()
        if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
            raise CheckpointError(f"{path} was changed while it was read. Try again.")
    except FileNotFoundError as error:
        raise MissingPathError(f"{path} is missing. Is this the folder you meant?") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Restore it from its source.") from error
    return parse_json(content, path, schema_version)


def parse_json(content: bytes, path: Path, schema_version: int) -> dict[str, Any]:
    """Parse a JSON object that was read from `path`, as `read_json` does."""
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}). Restore it from its source.") from error
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != schema_version:
        raise CheckpointError(
            f"{path} has schema_version {version!r:.60}; this mergestream reads version {schema_version}. "
            f"Install the mergestream that wrote it, or write it again with this one."
        )
    return value


@contextmanager
def process_lock(path: Path) -> Iterator[None]:
    """Let one process at a time into the block for `path`; the others wait. A killed process releases the lock."""
    make_folder(path.parent)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def lock_or_refuse(file: Path, refusal: OutputError) -> int:
    """Lock a file until the handle is closed or the process ends; raise `refusal` if another process has the lock."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o640)
    except OSError as error:
        raise OutputError(f"Cannot write {file}: {error_text(error)}.") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise refusal from error
    return handle


@contextmanager
def atomic_array(path: Path, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield a uint8 array on disk to fill; it replaces `path` when the block ends. For one process at a time.

    It may be larger than memory. Remains of a killed process are overwritten.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        array = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=shape)
        # Reserve the space now: writing to a mapped file on a full disk would kill the process.
        with part.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, part.stat().st_size)
        yield array
        array.flush()
        part.replace(path)
        flush(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputError(
            f"Cannot write {path}: {error_text(error)}. Free some space, or choose another folder."
        ) from error


def mapped_array(path: Path) -> np.ndarray | None:
    """Map an .npy file into memory; None if it is missing, damaged or a pickle.

    Writing to the array changes memory, not the file: torch needs writable arrays.
    """
    try:
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None


def error_text(error: BaseException) -> str:
    """The message of an error, without the number and the path of an OSError."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
