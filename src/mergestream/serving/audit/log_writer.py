"""The log writer: lines of many threads are written together, and `append` returns once its line is on disk."""

import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any, Self

from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.files import error_text, flush, lock_or_refuse, make_folder, sha256_of_file
from mergestream.serving.audit.line_kinds import OPENED, RECOVERED, RESUMED, ROTATION
from mergestream.serving.audit.lines import (
    BEGINNING,
    AuditError,
    Link,
    canonical,
    checked_kind,
    encoded_body,
    is_exchanged,
    link_of,
    opening_of,
    rotated_file,
    seal,
)
from mergestream.serving.audit.storage import Storage, last_link, move_torn_end, unrecorded_torn_ends
from mergestream.serving.tracing import span

if TYPE_CHECKING:
    from mergestream.serving.audit.keys import PrivateKey

ROTATE_BYTES = 64 * 2**20
log = logging.getLogger(__name__)


class _Entry:
    """A pending append: `line` is set once it is on disk, `failure` if it could not be written."""

    def __init__(self, kind: str, body: str) -> None:
        self.kind, self.body = kind, body
        self.line: str | None = None
        self.place: Link = BEGINNING
        self.failure: BaseException | None = None

    @property
    def waits(self) -> bool:
        return self.line is None and self.failure is None


class AuditLog:
    """One log, locked by one process; thread-safe."""

    def __init__(
        self,
        path: Path,
        key: "PrivateKey | None" = None,
        *,
        rotate_bytes: int = ROTATE_BYTES,
        on_append: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Begin or continue a log. A torn last line is moved to a .torn file and recorded in the log.

        `on_append` is called after each append with whether the line was written.
        """
        if rotate_bytes < 1:
            raise InputError(f"rotate_bytes must be at least 1, not {rotate_bytes}.")
        self.path = path = Path(path).absolute()
        self.failing: str | None = None  # why the last write failed; None when it worked
        self._key, self._rotate_bytes, self._on_append = key, rotate_bytes, on_append
        self._waiting: list[_Entry] = []
        self._turn, self._writing = Condition(), False
        self._failed_appends = 0
        make_folder(path.parent)
        refusal = AuditError(f"Another process writes the audit log {path}. Stop it, or choose another file.")
        self._lock_handle: int | None = lock_or_refuse(path.with_name(f".{path.name}.lock"), refusal)
        try:
            move_torn_end(path)
            self.last = last_link(path, key)  # the last line that is on disk
            if self.last != BEGINNING and is_exchanged(opening := opening_of(path), path):
                raise AuditError(f"{path} is the log of {opening['folder']}: two logs were exchanged. Put them back.")
            self._storage = Storage(path)
            self._record_torn_ends()
        except BaseException as error:
            if self._lock_handle is not None:  # else an interrupted write has released it
                os.close(self._lock_handle)
            if isinstance(error, OSError) and not isinstance(error, MergestreamError):
                raise AuditError(f"The audit log {path} cannot be opened: {error_text(error)}.") from error
            raise

    def append(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write one line and return it once it is on disk. AuditError: it is not, so no answer may leave."""
        line: dict[str, Any] = json.loads(self._append(kind, [body])[0].line or "")
        return line

    def append_all(self, kind: str, bodies: Sequence[Mapping[str, Any]]) -> list[Link]:
        """Write lines together; return their numbers, hashes and times once they are on disk. AuditError: none is."""
        return [entry.place for entry in self._append(kind, bodies)]

    def _append(self, kind: str, bodies: Sequence[Mapping[str, Any]]) -> list[_Entry]:
        entries = [_Entry(checked_kind(kind), encoded_body(body)) for body in bodies]
        try:
            with span("audit", kind=kind, lines=len(entries)):
                self._write(entries)
            return entries
        finally:
            for entry in entries:
                self._on_append(entry.line is not None)

    def close(self) -> None:
        """Finish what is being written and release the log."""
        with self._turn:
            self._turn.wait_for(lambda: not self._writing)
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, entries: Sequence[_Entry]) -> None:
        """Write entries, and those of other threads that wait, with one flush."""
        entry = entries[-1]  # all are in one group, so they are written or fail together
        with self._turn:
            self._waiting += entries
            # The first thread writes for all that wait; the others wake up when their line is written.
            self._turn.wait_for(lambda: not (entry.waits and self._writing))
            group = self._waiting if entry.waits else []
            if group:
                self._writing, self._waiting = True, []
        if group:
            self._commit(group)
        if entry.line is None:
            raise AuditError(
                f"The audit log {self.path} cannot be written ({_why(entry.failure)}). "
                "Free some space or repair the disk; the log then continues by itself."
            ) from entry.failure

    def _commit(self, group: list[_Entry]) -> None:
        try:
            for entry, (line, place) in zip(group, self._written(group), strict=True):
                entry.line, entry.place = line, place
            self.failing, self._failed_appends = None, 0
        except BaseException as error:
            for entry in group:
                entry.failure = error
            self._failed_appends += len(group)
            if self.failing is None:
                log.error("the audit log cannot be written: %s", _why(error))
            self.failing = _why(error)
            if not isinstance(error, OSError):
                # Interrupted at an unknown point: the log must be opened again, which reads what is on disk.
                self._release()
                raise
        finally:
            with self._turn:
                self._writing = False
                self._turn.notify_all()

    def _written(self, group: list[_Entry]) -> list[tuple[str, Link]]:
        """Write the group's lines and return them with their places in the chain."""
        if self._lock_handle is None:
            raise AuditError("it is closed")
        if self._storage.size >= self._rotate_bytes:
            self._storage.rotate()
        if self.failing is not None:
            self._storage.require_room()
        events, link, lines = self._events_due(), self.last, []
        for entry in (*events, *group):
            line, link = seal(entry.kind, entry.body, link, self._key)
            lines.append((line, link))
        self._storage.append("".join(f"{line}\n" for line, _ in lines).encode("ascii"))
        self.last = link_of(link)
        return lines[len(events) :]

    def _events_due(self) -> list[_Entry]:
        """Lines that the log writes about itself before it continues."""
        due = []
        if self.last == BEGINNING:
            due.append(_Entry(OPENED, canonical({"log": secrets.token_hex(16), "folder": self.path.parent.name})))
        elif self._storage.size == 0:
            before = rotated_file(self.path, self._storage.rotations).name
            due.append(_Entry(ROTATION, canonical({"previous_file": before})))
        if self.failing is not None:
            due.append(_Entry(RESUMED, canonical({"failed_appends": self._failed_appends, "reason": self.failing})))
        return due

    def _record_torn_ends(self) -> None:
        for torn in unrecorded_torn_ends(self.path):
            body = {"torn_bytes": torn.stat().st_size, "torn_sha256": sha256_of_file(torn)}
            entry = _Entry(RECOVERED, canonical(body))
            self._write([entry])
            torn.replace(self.path.with_name(f"{self.path.name}.{entry.place['sequence']}.torn"))
            flush(self.path.parent)
            log.warning("a torn end of %d bytes was moved aside from the audit log", body["torn_bytes"])

    def _release(self) -> None:
        if self._lock_handle is not None:
            self._storage.close()
            os.close(self._lock_handle)
            self._lock_handle = None


def _why(error: BaseException | None) -> str:
    return "unknown" if error is None else error_text(error) or type(error).__name__


class NoAuditLog:
    """In place of a log for a service started with --no-audit."""

    failing = last = None

    def append(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def append_all(self, kind: str, bodies: Sequence[Mapping[str, Any]]) -> list[Link]:
        return [self.append(kind, body) for body in bodies]

    def close(self) -> None:
        pass
