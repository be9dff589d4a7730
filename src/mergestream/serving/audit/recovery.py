"""Recovery of a log that a killed process left: check the last line; move a torn one to a file of its own."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.runtime.errors import InputError
from mergestream.runtime.files import error_text, write_atomically
from mergestream.serving.audit.lines import BEGINNING, AuditError, LineError, Link, faults, parse
from mergestream.serving.audit.log_files import last_line, tail_of

if TYPE_CHECKING:
    from mergestream.serving.audit.keys import PublicKey

OPENING = b'{"body":'  # every line begins with this


@dataclass(frozen=True)
class TornEnd:
    """A torn end that was moved aside and is not recorded in the log yet."""

    file: Path
    bytes: int
    sha256: str

    def rename_as_recorded(self, log: Path, sequence: int) -> None:
        """Name the file after the line that records it."""
        self.file.replace(log.with_name(f"{log.name}.{sequence}.torn"))


def move_torn_end(path: Path) -> None:
    """Move what a kill or a power failure left of a last line into a file of its own.

    A kill during this is harmless: the next opening does it again.
    """
    if not path.is_file():
        return
    tail = tail_of(path)
    torn, end = tail.torn, tail.end
    if not torn and tail.line is not None and not _is_json(tail.line):
        # A power failure can also leave a hole before the newline.
        torn, end = tail.line + b"\n", tail.end - len(tail.line) - 1
    if not torn:
        return
    if end == 0 and not (torn.startswith(OPENING) or OPENING.startswith(torn)):
        raise InputError(f"{path} is not an audit log and was not touched. Choose another file for the log.")
    if end and (before := tail_of(path, end).line) is not None:
        _parsed(path, path.name, before)
    aside = path.with_name(f"{path.name}.{hashlib.sha256(torn).hexdigest()[:16]}.unrecorded.torn")
    write_atomically(aside, lambda temporary: temporary.write_bytes(torn))
    _truncate(path, end)


def unrecorded_torn_ends(path: Path) -> Iterator[TornEnd]:
    pattern = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.unrecorded\.torn")
    for file in sorted(each for each in path.parent.glob("*") if pattern.fullmatch(each.name)):
        content = file.read_bytes()
        yield TornEnd(file, len(content), hashlib.sha256(content).hexdigest())


def last_link(path: Path, key: "PublicKey | None") -> Link:
    """The last line's place in the chain. It must be sound, and signed with the key in use."""
    last = last_line(path)
    if last is None:
        return BEGINNING
    name, text = last
    line = _parsed(path, name, text)
    key_id = key.id if key else None
    if line["key"] != key_id:
        raise InputError(
            f"The audit log {path} was signed with {line['key'] or 'no key'}, not with {key_id or 'no key'}. "
            "One log has one key: give that one, or begin a new log and keep both."
        )
    if wrong := faults(line, key):
        raise AuditError(f"The last line of {path.with_name(name)} {wrong[0]}. Run 'audit verify' before going on.")
    return Link(line["sequence"], line["hash"])


def _parsed(path: Path, name: str, text: bytes) -> dict[str, Any]:
    try:
        return parse(text)
    except LineError as error:
        raise AuditError(
            f"The last line of {path.with_name(name)} {error}. Nothing was touched: run 'audit verify'."
        ) from error


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text.decode("ascii"))
    except (ValueError, RecursionError):
        return False
    return True


def _truncate(path: Path, end: int) -> None:
    try:
        handle = os.open(path, os.O_RDWR)
        try:
            os.ftruncate(handle, end)
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise AuditError(f"Cannot repair the end of {path}: {error_text(error)}.") from error
