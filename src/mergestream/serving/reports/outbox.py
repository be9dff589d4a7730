"""The outbox: every report and destination is an entry on disk until the destination has confirmed it.

Reports are files; what is to be done with them is in a database (SQLite, which syncs each change to the disk). A file
is complete before its entries exist, and is removed after its last entry is done: so a kill loses nothing. An entry
that is done stays for some weeks, so that the same report is not made again when its image is delivered again.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mergestream.runtime.errors import OutputError
from mergestream.runtime.files import make_folder, write_atomically

WAITING, SENT, FAILED, HELD = "waiting", "sent", "failed", "held"  # held: in shadow mode nothing is sent
DAY = 86400.0
KEEP_SECONDS = 30 * DAY
TABLES = """
PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;
CREATE TABLE IF NOT EXISTS entries (
    uid TEXT, destination TEXT, kind TEXT, state TEXT, created REAL, changed REAL, next_try REAL, tries INTEGER,
    bytes INTEGER, reason TEXT, PRIMARY KEY (uid, destination)
);
CREATE TABLE IF NOT EXISTS answers (
    uid TEXT, frame INTEGER, accession TEXT, time REAL, prediction TEXT, PRIMARY KEY (uid, frame)
);
CREATE INDEX IF NOT EXISTS by_state ON entries (destination, state, next_try);
"""


class Entry(NamedTuple):
    """A report for one destination."""

    uid: str  # SOP instance UID of the report
    destination: str
    kind: str
    created: float  # seconds since 1970
    tries: int


class Outbox:
    """Safe to use from several threads of one process."""

    def __init__(self, folder: Path, most_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._objects, self._most, self._clock = make_folder(folder / "objects"), most_bytes, clock
        folder.chmod(0o700)
        self._lock = threading.Lock()
        self.listeners: list[threading.Event] = []  # set when there is something to send
        self._base = sqlite3.connect(folder / "outbox.sqlite", check_same_thread=False, isolation_level=None)
        with _as_output_error():
            self._base.executescript(TABLES)
        self.prune()

    def put(self, uid: str, kind: str, make: Callable[[], bytes], destinations: Sequence[str], state: str) -> None:
        """Add a report for some destinations; it is made only if one of them has not got it yet."""
        queued = {name for (name,) in self._rows("SELECT destination FROM entries WHERE uid = ?", uid)}
        new = [name for name in destinations if name not in queued]
        if not new:
            return
        file = self.file_of(uid)
        if not file.exists():  # else it is whole: left by a process that was killed, or waiting for another destination
            data = make()
            if self.held_bytes() + len(data) > self._most:
                raise OutputError(f"The outbox holds {self._most >> 20} MiB already. Check its destinations.")
            write_atomically(file, partial(Path.write_bytes, data=data))
        now, size = self._clock(), file.stat().st_size
        for name in new:
            entry = (uid, name, kind, state, now, now, now, 0, size, "")
            self._rows("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", *entry)
        self._wake()

    def record_answer(self, uid: str, frame: int, accession: str, prediction: str | None) -> None:
        """Record an answer of shadow mode, to compare it with readings. The first answer to an image stays."""
        answer = (uid, frame, accession, self._clock(), prediction)
        self._rows("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?)", *answer)

    def settle(self, entry: Entry, state: str, reason: str = "", seconds: float = 0.0) -> None:
        """Note how a try ended, and in how many seconds the next may follow. FAILED: an administrator must ask."""
        now = self._clock()
        self._rows(
            "UPDATE entries SET state = ?, changed = ?, reason = ?, next_try = ?, tries = tries + 1 "
            "WHERE uid = ? AND destination = ?", state, now, reason, now + seconds, entry.uid, entry.destination,
        )  # fmt: skip
        if not self._rows("SELECT 1 FROM entries WHERE uid = ? AND state != ?", entry.uid, SENT):
            self.file_of(entry.uid).unlink(missing_ok=True)

    def retry_failed(self) -> None:
        """Let all failed entries be tried again, with their full time."""
        change = "UPDATE entries SET state = ?, created = ?, next_try = 0, tries = 0 WHERE state = ?"
        self._rows(change, WAITING, self._clock(), FAILED)
        self._wake()

    def prune(self) -> None:
        """Forget entries that were done or held back long ago, and remove files that no entry needs."""
        before = self._clock() - KEEP_SECONDS
        self._rows("DELETE FROM entries WHERE state IN (?, ?) AND changed < ?", SENT, HELD, before)
        needed = {f"{uid}.dcm" for (uid,) in self._rows("SELECT uid FROM entries WHERE state != ?", SENT)}
        for path in self._objects.iterdir():
            if path.name not in needed:
                path.unlink(missing_ok=True)

    def due(self, destination: str, most: int) -> list[Entry]:
        """The entries to send now, oldest first."""
        query = (
            "SELECT uid, destination, kind, created, tries FROM entries "
            "WHERE destination = ? AND state = ? AND next_try <= ? ORDER BY created LIMIT ?"
        )
        return [Entry(*row) for row in self._rows(query, destination, WAITING, self._clock(), most)]

    def file_of(self, uid: str) -> Path:
        return self._objects / f"{uid}.dcm"

    def age(self, entry: Entry) -> float:
        return self._clock() - entry.created

    def held_bytes(self) -> int:
        query = "SELECT COALESCE(SUM(bytes), 0) FROM (SELECT DISTINCT uid, bytes FROM entries WHERE state != ?)"
        return int(self._rows(query, SENT)[0][0])

    def counts(self, destination: str) -> dict[str, Any]:
        """Entries of a destination by state, the age of the oldest that waits, and the last reason of a failure."""
        query = "SELECT state, COUNT(*), MIN(created) FROM entries WHERE destination = ? GROUP BY state"
        rows = {state: (count, self._clock() - oldest) for state, count, oldest in self._rows(query, destination)}
        query = "SELECT reason FROM entries WHERE destination = ? AND reason != '' ORDER BY changed DESC LIMIT 1"
        reasons = self._rows(query, destination)
        numbers = {state: rows.get(state, (0, 0))[0] for state in (WAITING, SENT, FAILED, HELD)}
        oldest = max(0.0, rows.get(WAITING, (0, 0.0))[1])
        return {**numbers, "oldest_seconds": oldest, "last_error": reasons[0][0] if reasons else None}

    def _wake(self) -> None:
        for listener in self.listeners:
            listener.set()

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement, which is a transaction of its own."""
        with self._lock, _as_output_error():
            return self._base.execute(query, values).fetchall()


@contextlib.contextmanager
def _as_output_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OutputError(f"The outbox cannot be read or written: {error}.") from error
