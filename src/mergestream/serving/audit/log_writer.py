"""The writer: many threads append, their lines reach the disk together, and no append returns before."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from threading import Condition
from typing import Any, Self

from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.files import error_text, make_folder
from mergestream.serving.audit.keys import Signer
from mergestream.serving.audit.lines import (
    BEGINNING,
    RECOVERED,
    RESUMED,
    ROTATION,
    AuditError,
    canonical,
    checked_kind,
    encoded_body,
    seal,
)
from mergestream.serving.audit.log_files import rotated_file
from mergestream.serving.audit.recovery import last_link, put_torn_end_aside, unrecorded
from mergestream.serving.audit.storage import Storage, flush_folder, lock

ROTATE_BYTES = 64 * 2**20
log = logging.getLogger(__name__)


class _Entry:
    """An append on its way: `line` once it is on the disk, `failure` once it is known not to be."""

    def __init__(self, kind: str, body: str) -> None:
        self.kind, self.body = kind, body
        self.line: str | None = None
        self.failure: BaseException | None = None

    @property
    def waits(self) -> bool:
        return self.line is None and self.failure is None


class AuditLog:
    """One log, held by one process. Made by `open`; for any number of threads."""

    def __init__(self, path: Path, signer: Signer | None, rotate_bytes: int, held: int) -> None:
        put_torn_end_aside(path)
        self.path = path
        self.failing: str | None = None  # why the last write failed; None when it worked
        self._signer, self._rotate_bytes = signer, rotate_bytes
        self._last = last_link(path, signer)
        self._storage = Storage(path)
        self._held: int | None = held
        self._waiting: list[_Entry] = []
        self._turn, self._writing = Condition(), False
        self._failed_appends = 0

    @classmethod
    def open(cls, path: Path, signer: Signer | None = None, *, rotate_bytes: int = ROTATE_BYTES) -> Self:
        """Begin a log or go on with one. A torn last line is put into a .torn file and told of in the log."""
        if rotate_bytes < 1:
            raise InputError(f"rotate_bytes must be at least 1, not {rotate_bytes}.")
        path = Path(path).absolute()
        make_folder(path.parent)
        held = lock(path)
        try:
            opened = cls(path, signer, rotate_bytes, held)
            opened._tell_of_torn_ends()
        except BaseException as error:
            os.close(held)
            if isinstance(error, OSError) and not isinstance(error, MergestreamError):
                raise AuditError(f"The audit log {path} cannot be opened: {error_text(error)}.") from error
            raise
        return opened

    def append(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write one line and return it once it is on the disk. AuditError: it is not, and no answer may leave."""
        return self._appended(_Entry(checked_kind(kind), encoded_body(body)))

    def close(self) -> None:
        """Let go of the log; what is being written is finished before."""
        with self._turn:
            self._turn.wait_for(lambda: not self._writing)
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _appended(self, entry: _Entry) -> dict[str, Any]:
        with self._turn:
            self._waiting.append(entry)
            # Whoever finds nobody writing writes for all who wait. The others wake up when their line is written.
            self._turn.wait_for(lambda: not (entry.waits and self._writing))
            group = self._waiting if entry.waits else []
            if group:
                self._writing, self._waiting = True, []
        if group:
            self._commit(group)
        if entry.line is None:
            raise AuditError(
                f"The audit log {self.path} cannot be written ({_why(entry.failure)}). "
                "Make room or mend the disk: appends work again as soon as a write does."
            ) from entry.failure
        written: dict[str, Any] = json.loads(entry.line)
        return written

    def _commit(self, group: list[_Entry]) -> None:
        try:
            lines = self._written(group)
            for entry, line in zip(group, lines, strict=True):
                entry.line = line
            self.failing, self._failed_appends = None, 0
        except BaseException as error:
            self._failed(group, error)
            if not isinstance(error, OSError):
                # Interrupted: nobody knows between which two statements. Opening it anew reads what is there.
                self._let_go()
                raise
        finally:
            with self._turn:
                self._writing = False
                self._turn.notify_all()

    def _written(self, group: list[_Entry]) -> list[str]:
        """The group's lines, on the disk."""
        if self._held is None:
            raise AuditError("it is closed")
        if self._storage.size >= self._rotate_bytes:
            self._storage.rotate()
        if self.failing is not None:
            self._storage.require_room()
        events, link, lines = self._events_due(), self._last, []
        for entry in (*events, *group):
            line, link = seal(entry.kind, entry.body, link, self._signer)
            lines.append(line)
        self._storage.append("".join(f"{line}\n" for line in lines).encode("ascii"))
        self._last = link
        return lines[len(events) :]

    def _failed(self, group: list[_Entry], error: BaseException) -> None:
        for entry in group:
            entry.failure = error
        self._failed_appends += len(group)
        if self.failing is None:
            log.error("the audit log cannot be written: %s", _why(error))
        self.failing = _why(error)

    def _events_due(self) -> list[_Entry]:
        """What the log tells of itself before it goes on."""
        due = []
        if self._storage.size == 0 and self._last != BEGINNING:
            before = rotated_file(self.path, self._storage.rotations).name
            due.append(_Entry(ROTATION, canonical({"previous_file": before})))
        if self.failing is not None:
            due.append(_Entry(RESUMED, canonical({"failed_appends": self._failed_appends, "reason": self.failing})))
        return due

    def _tell_of_torn_ends(self) -> None:
        for torn in unrecorded(self.path):
            body = {"torn_bytes": torn.bytes, "torn_sha256": torn.sha256}
            line = self._appended(_Entry(RECOVERED, canonical(body)))
            torn.rename_as_recorded(self.path, line["sequence"])
            flush_folder(self.path.parent)
            log.warning("a torn end of %d bytes was put aside from the audit log", torn.bytes)

    def _let_go(self) -> None:
        if self._held is not None:
            self._storage.close()
            os.close(self._held)
            self._held = None


def _why(error: BaseException | None) -> str:
    return "unknown" if error is None else error_text(error) or type(error).__name__
