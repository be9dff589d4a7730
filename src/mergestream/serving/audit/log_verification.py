"""Verify a log from its first line to its last, with one line in memory at a time; anchors show a cut tail."""

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.files import read_json
from mergestream.serving.audit.lines import (
    BEGINNING,
    RECOVERED,
    RESUMED,
    SCHEMA_VERSION,
    AuditError,
    LineError,
    Link,
    RawLine,
    faults,
    last_line,
    parse,
    raw_lines,
    rotated_file,
    rotated_numbers,
)

if TYPE_CHECKING:
    from mergestream.serving.audit.keys import PublicKey

MOST_LISTED = 100
TORN = "A killed writer leaves this of a line that it had not confirmed; or the line is being written now."
HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Anchor:
    sequence: int
    hash: str
    time: str
    key: str | None
    signature: str | None

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Anchor":
        return cls(line["sequence"], line["hash"], line["time"], line["key"], line["signature"])

    def fault(self, key: "PublicKey | None") -> str | None:
        """Why this anchor cannot be trusted, or None."""
        if key is None or (self.key == key.id and key.fits(self.hash, self.signature or "")):
            return None
        return f"was not signed with the key {key.id}: fetch it again from where it was stored"


def head(path: Path) -> Anchor:
    """The anchor of a log's last whole line, also while a service writes to it."""
    last = last_line(path)
    if last is None:
        raise InputError(f"There is no line of an audit log at {path}.")
    name, text = last
    try:
        line = parse(text)
        wrong = faults(line, None)
    except LineError as error:
        wrong = [str(error)]
    if wrong:
        raise AuditError(f"The last line of {path.with_name(name)} {wrong[0]}. Run 'audit verify'.")
    return Anchor.of(line)


def read_anchor(file: Path) -> Anchor:
    """Read an anchor that `audit head` printed."""
    value = read_json(file, SCHEMA_VERSION)
    value.pop("schema_version")
    try:
        anchor = Anchor(**value)
    except TypeError as error:
        raise CheckpointError(f"{file} is not an anchor of an audit log: {error}.") from error
    texts = (anchor.time, anchor.key or "", anchor.signature or "")
    if type(anchor.sequence) is not int or not all(isinstance(text, str) for text in (anchor.hash, *texts)):
        raise CheckpointError(f"{file} is not an anchor of an audit log: a field has a wrong type.")
    if not HASH.fullmatch(anchor.hash):
        raise CheckpointError(f"{file} is not an anchor of an audit log: its hash is not a sha-256.")
    return anchor


@dataclass(frozen=True)
class LineProblem:
    """A problem of one line. `line` counts from 1 in its file; 0 is the file as a whole."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.what}" if self.line else f"{self.file}: {self.what}"


@dataclass
class VerificationReport:
    """Result of a verification. A torn last line and the notes are not problems."""

    problems: list[LineProblem] = field(default_factory=list)  # the first of them
    problem_count: int = 0
    torn: LineProblem | None = None
    notes: list[str] = field(default_factory=list)
    lines: int = 0
    head: Anchor | None = None
    key: str | None = None
    signatures_checked: bool = False
    anchor_checked: bool = False

    @property
    def sound(self) -> bool:
        return self.problem_count == 0

    def to_json(self) -> dict[str, Any]:
        head = self.head.to_json() if self.head else None
        return {"sound": self.sound, **asdict(self), "head": head}


def verify(path: Path, key: "PublicKey | None" = None, anchor: Anchor | None = None) -> VerificationReport:
    """Check every line of every file: content, order, chain, signatures, and the tail if there is an anchor."""
    check = _Check(key, anchor)
    for raw in raw_lines(path):
        check.take(raw)
    numbers = rotated_numbers(path)
    for number in sorted(set(range(1, max(numbers, default=0))) - set(numbers)):
        check.problem(rotated_file(path, number).name, 0, "is missing")
    check.finish(path)
    return check.report


class _Check:
    def __init__(self, key: "PublicKey | None", anchor: Anchor | None) -> None:
        self.key, self.anchor = key, anchor
        self.report = VerificationReport(signatures_checked=key is not None)
        self.last: Link = BEGINNING
        self.time = ""
        self.file = ""
        self.resumed = 0
        self.set_back = 0

    def problem(self, file: str, line: int, what: str) -> None:
        self.report.problem_count += 1
        if len(self.report.problems) < MOST_LISTED:
            self.report.problems.append(LineProblem(file, line, what))

    def take(self, raw: RawLine) -> None:
        self.file = raw.file
        if raw.torn:
            self.report.torn = LineProblem(raw.file, raw.number, f"is torn after {len(raw.text)} bytes")
            return
        if not raw.whole:
            self.problem(raw.file, raw.number, "has no end: a newline was removed or changed")
            return
        self.report.lines += 1
        try:
            line = parse(raw.text)
        except LineError as error:
            self.problem(raw.file, raw.number, str(error))
            return
        for what in (*faults(line, self.key), *self._breaks(line)):
            self.problem(raw.file, raw.number, what)
        self._remember(line, raw)

    def _breaks(self, line: dict[str, Any]) -> list[str]:
        """Check that this line continues the one before it."""
        expected, number = self.last.sequence + 1, line["sequence"]
        if number > expected:
            missing = str(expected) if number == expected + 1 else f"{expected} to {number - 1}"
            return [f"has number {number}, and nothing sound with number {missing} comes before it: removed or moved"]
        if number < expected:
            return [f"has number {number} where {expected} belongs: repeated, inserted or moved"]
        if line["previous"] != self.last.hash:
            return ["does not hold the hash of the line before it: one of the two was replaced"]
        if self.key is None and self.report.head is not None and line["key"] != self.report.key:
            return [f"changes the key from {self.report.key or 'none'} to {line['key'] or 'none'}"]
        return []

    def _remember(self, line: dict[str, Any], raw: RawLine) -> None:
        if self.anchor is not None and line["sequence"] == self.anchor.sequence:
            self.report.anchor_checked = True
            if line["hash"] != self.anchor.hash:
                self.problem(raw.file, raw.number, "is not the line the anchor was made of: history was rewritten")
        if line["kind"] == RECOVERED and len(self.report.notes) < MOST_LISTED:
            size, digest = line["body"].get("torn_bytes"), line["body"].get("torn_sha256")
            self.report.notes.append(
                f"{raw.file}, line {raw.number}: a torn end of {size} bytes was moved aside here (sha-256 {digest})."
            )
        self.resumed += line["kind"] == RESUMED
        self.set_back += line["time"] < self.time
        self.last, self.time = Link(line["sequence"], line["hash"]), line["time"]
        self.report.head, self.report.key = Anchor.of(line), line["key"]

    def finish(self, path: Path) -> None:
        self._finish_anchor()
        notes = {
            "The log is empty.": self.report.head is None,
            f"{path.name} itself is not there: the writer was killed while it rotated, or the file was removed.": (
                not path.is_file()
            ),
            "The lines are not signed: anyone who can write the files can rewrite all of them unnoticed.": (
                self.report.head is not None and self.report.key is None
            ),
            "The signatures were not checked: give the site's public key.": (
                self.report.key is not None and self.key is None
            ),
            "No anchor was given, so lines cut from the end are not noticed.": self.anchor is None,
            f"{self.resumed} time(s) the log could not be written for a while; 'resumed' lines say when.": self.resumed
            > 0,
            f"{self.set_back} time(s) the clock was set back between two lines.": self.set_back > 0,
        }
        self.report.notes += [note for note, holds in notes.items() if holds]

    def _finish_anchor(self) -> None:
        if self.anchor is None:
            return
        if fault := self.anchor.fault(self.key):
            self.problem("the anchor", 0, fault)
        if not self.report.anchor_checked:
            last, anchored = self.last.sequence, self.anchor.sequence
            what = f"the log ends with number {last}, but the anchor is of number {anchored}: the tail was cut"
            if last > anchored:
                what = f"the line with number {anchored}, which the anchor was made of, is missing"
            self.problem(self.file or "the log", 0, what)


def in_words(report: VerificationReport) -> list[str]:
    """Problems, notes, and the verdict last."""
    rest = report.problem_count - len(report.problems)
    verdict = f"Sound: {report.lines} lines." if report.sound else f"NOT sound: {report.problem_count} problem(s)."
    return [
        *(f"Wrong: {problem}" for problem in report.problems),
        *([f"Wrong: {rest} more."] if rest else []),
        *([f"Torn: {report.torn}. {TORN}"] if report.torn else []),
        *(f"Note: {note}" for note in report.notes),
        verdict,
    ]
