"""Files that are written whole or not at all, and hashed."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mergestream.errors import CheckpointError, MergestreamError, OutputError


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_json(value: Any) -> str:
    """A hash of JSON content that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def make_folder(folder: Path) -> Path:
    """Create an output folder and prove that it can be written, before any work is spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"Cannot write to the folder {folder}: {reason(error)}. Choose another one.") from error
    return folder


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then rename it into place; on any failure the old file stays."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        _flush(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
        _flush(path.parent)
    except Exception as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, MergestreamError):
            raise
        # safetensors reports a full disk as an error of its own, not as OSError.
        raise OutputError(f"Cannot write {path}: {reason(error)}. What stood there before is unchanged.") from error


@contextmanager
def folder_written_whole(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder that takes `folder`'s place only when the block ends without error."""
    make_folder(folder.parent)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    scratch.chmod(0o755)
    try:
        yield scratch
        _flush(scratch)
        _swap_in(scratch, folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _swap_in(scratch: Path, folder: Path) -> None:
    old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old."))
    try:
        if folder.exists():
            folder.replace(old)
        scratch.replace(folder)
        _flush(folder.parent)
    except OSError as error:
        if not folder.exists() and any(old.iterdir()):
            old.replace(folder)
        raise OutputError(f"Cannot put the folder {folder} in place: {reason(error)}.") from error
    finally:
        shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, schema_version: int) -> dict[str, Any]:
    """Read a JSON object of a known version; anything else is refused by name."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. Is this the folder you meant?") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}). Restore it from its source.") from error
    found = value.get("schema_version") if isinstance(value, dict) else None
    if found != schema_version:
        raise CheckpointError(
            f"{path} has schema_version {found}; this mergestream reads version {schema_version}. "
            f"Install the mergestream that wrote it, or write it again with this one."
        )
    return value


def reason(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
