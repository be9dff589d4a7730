"""The files of one log, oldest first: audit.jsonl.000001, audit.jsonl.000002, …, and audit.jsonl, the current one."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mergestream.runtime.errors import InputError
from mergestream.runtime.files import error_text
from mergestream.serving.audit.lines import LONGEST, AuditError

BLOCK = 2**16


@dataclass(frozen=True)
class RawLine:
    """A line as stored in a file, without its newline."""

    file: str
    number: int  # counted from 1
    text: bytes
    torn: bool  # it ends where the log ends, without a newline
    whole: bool


@dataclass(frozen=True)
class Tail:
    """How a file ends: its last whole line, where that ends, and what follows without a newline."""

    line: bytes | None
    end: int
    torn: bytes


def rotated_file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number:06d}")


def rotated_numbers(path: Path) -> list[int]:
    pattern = re.compile(re.escape(path.name) + r"\.(\d{6,})")
    matches = (pattern.fullmatch(each.name) for each in path.parent.glob("*"))
    return sorted(int(match[1]) for match in matches if match)


def raw_lines(path: Path) -> Iterator[RawLine]:
    """Yield every line of every file, also while a service writes to the log."""
    try:
        with ExitStack() as stack:
            # Opened before the others are listed: a rotation in between renames it, but it stays the same file.
            current = stack.enter_context(path.open("rb")) if path.is_file() else None
            numbers = rotated_numbers(path)
            if current is None and not numbers:
                raise InputError(f"There is no audit log at {path}.")
            for number in numbers:
                with rotated_file(path, number).open("rb") as file:
                    if current is not None and os.path.samestat(os.fstat(file.fileno()), os.fstat(current.fileno())):
                        break
                    yield from _lines_of(file, rotated_file(path, number).name, last=False)
            if current is not None:
                yield from _lines_of(current, path.name, last=True)
    except OSError as error:
        raise AuditError(f"The audit log {path} cannot be read: {error_text(error)}.") from error


def _lines_of(file: BinaryIO, name: str, *, last: bool) -> Iterator[RawLine]:
    number = 0
    while text := file.readline(LONGEST + 1):
        number += 1
        whole = text.endswith(b"\n")
        yield RawLine(name, number, text.removesuffix(b"\n"), last and not whole and len(text) <= LONGEST, whole)


def last_line(path: Path) -> tuple[str, bytes] | None:
    """File name and text of the last whole line of a log, or None."""
    for file in (path, *(rotated_file(path, number) for number in reversed(rotated_numbers(path)))):
        if file.is_file() and (line := tail_of(file).line) is not None:
            return file.name, line
    return None


def tail_of(path: Path, size: int | None = None) -> Tail:
    """Read the end of a file, or of its first `size` bytes."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END) if size is None else size
            length = BLOCK
            while True:
                start = max(0, size - length)
                file.seek(start)
                whole, newline, torn = file.read(size - start).rpartition(b"\n")
                before = whole.rfind(b"\n")
                if start == 0 or (newline and before >= 0):
                    return Tail(whole[before + 1 :] if newline else None, size - len(torn), torn)
                if length > 2 * LONGEST:
                    raise InputError(f"{path} is not an audit log: a line in it has more than {LONGEST} bytes.")
                length *= 4
    except OSError as error:
        raise AuditError(f"The audit log {path} cannot be read: {error_text(error)}.") from error
