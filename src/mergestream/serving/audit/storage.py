"""The file being written, and its recovery after a kill: a line is on disk as a whole or not at all."""

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.runtime.errors import InputError
from mergestream.runtime.files import error_text, flush, write_atomically
from mergestream.serving.audit.lines import (
    BEGINNING,
    AuditError,
    Link,
    last_line,
    last_line_of,
    link_of,
    rotated_file,
    rotated_numbers,
    tail_of,
)

if TYPE_CHECKING:
    from mergestream.serving.audit.keys import PublicKey

MODE = 0o640
ROOM = 64 * 1024  # more than a step's line takes
OPENING = b'{"body":'  # every line begins with this


class Storage:
    """Not thread-safe; needs `lock`. Every failure is an OSError and leaves `size` at the last whole line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.rotations = max(rotated_numbers(path), default=0)
        self._handle: int | None = None
        self._unsure = False  # bytes may lie beyond `size`
        self._folder_unsure = False  # the disk may not know the file's name yet
        if path.exists():
            self._handle = os.open(path, os.O_RDWR)
            self.size = os.fstat(self._handle).st_size

    def append(self, data: bytes) -> None:
        self._write(data)
        self.size += len(data)
        self._unsure = False

    def require_room(self) -> None:
        """Fail unless a step's line fits on the disk: a short line may fit where a step does not. Nothing stays."""
        self._cut_back(self._write(bytes(ROOM)))

    def rotate(self) -> None:
        """Rename the file to its number; the next `append` begins a new one."""
        handle = self._opened()
        target = rotated_file(self.path, self.rotations + 1)
        if target.exists():
            raise AuditError(f"{target} is in the way of the audit log's rotation. Move it elsewhere.")
        self.path.rename(target)
        self._folder_unsure = True
        self.rotations += 1
        self._handle, self.size, self._unsure = None, 0, False
        os.close(handle)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _opened(self) -> int:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, MODE)
            self._folder_unsure = True
        if self._folder_unsure:
            os.fsync(self._handle)
            flush(self.path.parent)
            self._folder_unsure = False
        self._require_unchanged(self._handle)
        return self._handle

    def _require_unchanged(self, handle: int) -> None:
        """Fail if someone moved, replaced or wrote to the file: lines written to it might be lost."""
        opened = os.fstat(handle)
        try:
            same = os.path.samestat(opened, self.path.stat())
        except FileNotFoundError:
            same = False
        if not same:
            raise AuditError(f"{self.path} was moved or replaced while it was written. Put it back, or start again.")
        if opened.st_size < self.size or (opened.st_size > self.size and not self._unsure):
            raise AuditError(f"{self.path} was changed by someone else while it was written. Run 'audit verify'.")

    def _write(self, data: bytes) -> int:
        """Write after the last whole line, to the disk; return the file's handle."""
        handle, rest, offset = self._opened(), memoryview(data), self.size
        if self._unsure:
            self._cut_back(handle)
        self._unsure = True
        try:
            while rest:
                written = os.pwrite(handle, rest, offset)
                rest, offset = rest[written:], offset + written
            # Without the times, which would cost a second write (macOS has only the full sync).
            getattr(os, "fdatasync", os.fsync)(handle)
        except BaseException:
            # After a failed sync the kernel may call lost pages clean: only bytes written anew can be trusted.
            with suppress(OSError):  # tried again by the next write
                self._cut_back(handle)
            raise
        return handle

    def _cut_back(self, handle: int) -> None:
        os.ftruncate(handle, self.size)
        os.fsync(handle)
        self._unsure = False


def move_torn_end(path: Path) -> None:
    """Move what a kill or a power failure left of a last line into a file of its own.

    A kill during this is harmless: the next opening does it again.
    """
    if not path.is_file():
        return
    line, end, torn = tail_of(path)
    if not torn and line is not None and not _is_json(line):
        # A power failure can also leave a hole before the newline.
        torn, end = line + b"\n", end - len(line) - 1
    if not torn:
        return
    if end == 0 and not (torn.startswith(OPENING) or OPENING.startswith(torn)):
        raise InputError(f"{path} is not an audit log and was not touched. Choose another file for the log.")
    if end:
        last_line_of(path, size=end)
    aside = path.with_name(f"{path.name}.{hashlib.sha256(torn).hexdigest()[:16]}.unrecorded.torn")
    write_atomically(aside, lambda temporary: temporary.write_bytes(torn))
    try:
        os.truncate(path, end)
        flush(path)
    except OSError as error:
        raise AuditError(f"Cannot repair the end of {path}: {error_text(error)}.") from error


def unrecorded_torn_ends(path: Path) -> list[Path]:
    """Torn ends that were moved aside and are not recorded in the log yet."""
    pattern = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.unrecorded\.torn")
    return sorted(each for each in path.parent.glob("*") if pattern.fullmatch(each.name))


def last_link(path: Path, key: "PublicKey | None") -> Link:
    """The last line's place in the chain. It must be sound, and signed with the key in use."""
    line = last_line(path)
    if line is None:
        return BEGINNING
    key_id = key.id if key else None
    if line["key"] != key_id:
        raise InputError(
            f"The audit log {path} was signed with {line['key'] or 'no key'}, not with {key_id or 'no key'}. "
            "One log has one key: give that one, or begin a new log in a new --state folder and keep both."
        )
    last_line(path, key)
    return link_of(line)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text.decode("ascii"))
    except (ValueError, RecursionError):
        return False
    return True
