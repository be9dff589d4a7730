"""The streams' states on disk, and how they are restored after a kill.

A step is written twice: first the audit line, flushed to the disk, which holds the state after the step; then the
stream's own file, put in place by a rename and not flushed. So

- a line that could not be written: the step did not happen; state, file and log are those before it, and the caller
  gets an error;
- killed between line and file: the log is one step ahead of the file, and the caller was not answered. At the next
  start the last event of a stream in the log is the truth (`recovered`), so the step counts, as the log says it does;
- a power failure may also lose or tear files that were not flushed: they are older than the log or unreadable, and the
  log is the truth again;
- a log that was emptied, cut, edited or exchanged: every file names the line it was saved after, and the lines that
  states are restored from are verified, so the service does not start (`recent_lines`).

The same holds for deleted and reset streams and for switched-off experts, which are events in the log too. A state too
large for a line (the Gram matrices of a method that learns from the stream) is written and flushed before it, into a
file named after the hash that stands in the line; of several lines written together, only the last one's. Where that
file is missing or does not fit, the stream starts anew and says so. A stream never goes on from a state that the log
does not know.
"""

import hashlib
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mergestream.runtime.errors import CheckpointError, OutputError
from mergestream.runtime.files import lock_or_refuse, make_folder, read_json, sha256_of_json, write_json
from mergestream.runtime.json_record import parsed
from mergestream.runtime.state_file import read_state, state_as_bytes
from mergestream.serving.audit.line_kinds import (
    ACKNOWLEDGED,
    DELETED,
    RELOADED,
    RESET,
    REVOKED,
    STARTED,
    STEP,
    SWITCHED,
)
from mergestream.serving.audit.lines import Link, encoded_body, link_of
from mergestream.serving.engine.answers import Answer, logged_answer
from mergestream.serving.engine.registry import NAME
from mergestream.serving.engine.stream_state import StreamState, content_sha256
from mergestream.serving.guards.findings import Alarm, acknowledge, alarms_after
from mergestream.serving.quality.step_sums import StepSums, Window, with_step

SCHEMA_VERSION = 1
HISTORY = 200  # steps per stream
NOT_SAVED = "the service ended before its last state was on disk."
Saved = dict[str, Any]
LoggedAnswer = tuple[str, Answer]  # with the time of its line
log = logging.getLogger(__name__)


class Recovery:
    """What an earlier process left: its streams by name, from the log or else from their files, and the rest of it."""

    def __init__(self, saved: Mapping[str, Saved], lines: Iterable[Mapping[str, Any]], classes: Sequence[str]) -> None:
        """`classes`: those of the pool, for predictions before the first line that names them."""
        self.streams, self._saved, self._classes = dict(saved), saved, classes
        self.off: list[str] | None = None  # switched-off experts; None where the log does not say
        self.alarms: dict[str, tuple[Alarm, ...]] = {}
        self.quality: dict[str, Window] = {}  # of the steps in these lines
        self.answers: dict[str, deque[LoggedAnswer]] = {}  # the last ones of every stream
        for line in lines:
            try:
                self._take(line["kind"], line["body"], line)
            except (KeyError, TypeError, IndexError) as error:
                raise CheckpointError(
                    f"Line {line.get('sequence')} of the audit log is not a '{line['kind']}' of this version: "
                    f"{error!r}. Begin a new log beside it and keep both."
                ) from error

    def _take(self, kind: str, body: Mapping[str, Any], line: Mapping[str, Any]) -> None:
        if kind in (SWITCHED, RELOADED, REVOKED):
            self.off = body["switched_off"]
        elif kind == STARTED:
            self._classes = body["classes"]
        if kind not in (STEP, RESET, DELETED, ACKNOWLEDGED):
            return
        name, link = body["stream"], link_of(line)
        if kind == STEP:
            self.streams[name] = _after_step(body, self._saved.get(name), link) | {"audit": link}
            answer = logged_answer(body, self._classes)
            self.answers.setdefault(name, deque(maxlen=HISTORY)).append((line["time"], answer))
            self.alarms[name] = alarms_after(self.alarms.get(name), answer.findings, answer.step, line["time"])
            self.quality[name] = with_step(self.quality.get(name, ()), parsed(StepSums, body["quality"]))
        elif kind == RESET:
            self.quality.pop(name, None)
            self.streams[name] = {field: body[field] for field in ("stream", "steps", "images")} | {"audit": link}
        elif kind == ACKNOWLEDGED:
            self.alarms[name] = acknowledge(self.alarms.get(name, ()), body["name"], line["time"])
        else:
            for part in (self.streams, self.answers, self.alarms, self.quality):
                part.pop(name, None)


def _after_step(body: Mapping[str, Any], on_disk: Saved | None, link: Link) -> Saved:
    stream: Saved = {"stream": body["stream"], "steps": body["step"] + 1, "images": body["images_so_far"]}
    stream |= {"method": body["method"], "options": body["options"]}
    state = body["state_after"]
    if "sha256" in state:  # a large one of version 0.1, which is in the stream's file as JSON
        state = on_disk["state"] if on_disk is not None and on_disk.get("audit") == link else None
        if state is None:
            return {**stream, "lost": NOT_SAVED}
    return {**stream, "state": state}


class StateFolder:
    """`<folder>/<stream>.json`, one per stream, and `<folder>/.service.json`. Locked by one process at a time.

    A large state lies beside its stream's file, as `<stream>.<start of its hash>.safetensors`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = make_folder(folder)
        refusal = OutputError(f"Another service keeps its streams in {folder}. Stop it, or choose another one.")
        self._lock: int | None = lock_or_refuse(folder / ".lock", refusal)
        for file in folder.glob("*.new"):  # of a process that was killed
            with suppress(OSError):
                file.unlink()
        self._large: dict[str, set[str]] = {}  # the files of large states, by stream
        for file in folder.glob("*.safetensors"):
            self._large.setdefault(file.name.split(".")[0], set()).add(str(file))

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def streams(self) -> dict[str, Saved]:
        """The streams whose files can be read. A damaged one is left out with a warning: the log may hold its state."""
        streams = {}
        for file in sorted(self.folder.glob("*.json")):
            if NAME.fullmatch(file.stem):
                try:
                    streams[file.stem] = _checked(read_json(file, SCHEMA_VERSION))
                except CheckpointError as error:
                    log.warning("a stream's state is left out: %s", error)
        return streams

    def save_large(self, stream: str, state: StreamState, before: StreamState | None) -> None:
        """Write a state that is too large for its line, before that line. `before`: the state until then."""
        if state.is_large:
            with _tolerated():
                self._keep_large(stream, before)  # of steps that were refused there may be others
            self._has_large(stream, state)

    def large_state(self, stream: str, sha256: str) -> dict[str, Any]:
        """The content of a large state; CheckpointError, with the reason why a stream starts anew, without it."""
        file = Path(self._large_file(stream, sha256))
        if not file.exists():
            raise CheckpointError(NOT_SAVED)
        with suppress(CheckpointError):
            content = read_state(file)
            if isinstance(content, dict) and content_sha256(content) == sha256:
                return content
        raise CheckpointError("its saved state was changed or torn.")

    def save(self, about: Saved, state: StreamState | None, *, tidy: bool = True) -> None:
        """Put a stream's file in place. Not flushed: its audit line was. `tidy`: remove its other large states."""
        content = encoded_body({**about, "state": None if state is None else state.encoded_in_line})
        digest = hashlib.sha256(content.encode()).hexdigest()
        name, text = about["stream"], f'{{"content":{content},"schema_version":{SCHEMA_VERSION},"sha256":"{digest}"}}'
        if state is not None and state.is_large and not self._has_large(name, state):
            return  # the file in place may be the only one with a whole state
        with _tolerated():
            self._put(name, f"{self.folder / name}.json", text.encode("ascii"))
            if tidy:
                self._keep_large(name, state)

    def delete(self, name: str) -> None:
        (self.folder / f"{name}.json").unlink(missing_ok=True)
        self._keep_large(name, None)

    def leftovers(self) -> set[str]:
        """Streams of which nothing but a large state is there: killed in their first step, or while being deleted."""
        return {name for name in self._large if not (self.folder / f"{name}.json").exists()}

    def _put(self, stream: str, path: str, content: bytes, *, flushed: bool = False) -> None:
        """Without Path objects, at every step."""
        new = f"{self.folder / stream}.new"
        try:
            with open(new, "wb") as file:  # noqa: PTH123
                file.write(content)
                if flushed:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(new, path)  # noqa: PTH105
        except OSError:
            with suppress(OSError):  # it may hold the disk's last bytes
                Path(new).unlink()
            raise

    def _has_large(self, stream: str, state: StreamState) -> bool:
        """Write a large state if its file is not there; whether it is there then."""
        path, files = self._large_file(stream, state.sha256), self._large.setdefault(stream, set())
        if path not in files:
            with _tolerated():
                self._put(stream, path, state_as_bytes(state.content), flushed=True)
                files.add(path)
        return path in files

    def _large_file(self, stream: str, sha256: str) -> str:
        return f"{self.folder / stream}.{sha256[:16]}.safetensors"

    def _keep_large(self, stream: str, state: StreamState | None) -> None:
        """Remove the files of a stream's other large states."""
        files = self._large.get(stream)
        if files is None:
            return
        kept = {self._large_file(stream, state.sha256)} if state is not None and state.is_large else set()
        for path in files - kept:
            Path(path).unlink(missing_ok=True)
        files &= kept

    def switched_off(self) -> list[str]:
        file = self.folder / ".service.json"
        return list(read_json(file, SCHEMA_VERSION)["switched_off"]) if file.exists() else []

    def save_service(self, off: Iterable[str], last: Link | None) -> None:
        """`last`: the log's last line now."""
        content = {"schema_version": SCHEMA_VERSION, "switched_off": list(off), "audit": last}
        with _tolerated():
            write_json(self.folder / ".service.json", content)


@contextmanager
def _tolerated() -> Iterator[None]:
    """Log a file that cannot be written and go on: its content can be restored from the audit log."""
    try:
        yield
    except OSError as error:
        log.warning("a state was not written: %s", error)


def _checked(value: Mapping[str, Any]) -> Saved:
    content = value.get("content")
    if not isinstance(content, dict) or sha256_of_json(content) != value.get("sha256"):
        raise CheckpointError("A stream's file does not match its hash: it was changed or torn.")
    return content
