"""Verify a log line by line, with one in memory at a time; anchors and saved states show a cut tail."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.files import read_json
from mergestream.serving.audit.chain import STREAMS, checked_lines, saved_links
from mergestream.serving.audit.line_kinds import RECOVERED, RESUMED
from mergestream.serving.audit.lines import (
    SCHEMA_VERSION,
    is_exchanged,
    last_line,
    opening_of,
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
    """The fields of a line that prove what the log was like when it was the last one."""

    schema_version: int
    sequence: int
    hash: str
    time: str
    key: str | None
    signature: str | None

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Anchor":
        return cls(**{name: line[name] for name in cls.__dataclass_fields__})


def head(path: Path) -> Anchor:
    """The anchor of a log's last whole line, also while a service writes to it."""
    last = last_line(path)
    if last is None:
        raise InputError(f"There is no line of an audit log at {path}.")
    return Anchor.of(last)


def read_anchor(file: Path) -> Anchor:
    """Read an anchor that `audit head` printed."""
    try:
        anchor = Anchor(**read_json(file, SCHEMA_VERSION))
    except TypeError as error:
        raise CheckpointError(f"{file} is not an anchor of an audit log: {error}.") from error
    texts = (anchor.hash, anchor.time, anchor.key or "", anchor.signature or "")
    if type(anchor.sequence) is not int or not all(isinstance(text, str) for text in texts):
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
    log: str | None = None  # its id
    signatures_checked: bool = False
    anchor_checked: bool = False

    @property
    def sound(self) -> bool:
        return self.problem_count == 0

    def to_json(self) -> dict[str, Any]:
        return {"sound": self.sound, **asdict(self)}

    def add(self, file: str, line: int, what: str) -> None:
        self.problem_count += 1
        if len(self.problems) < MOST_LISTED:
            self.problems.append(LineProblem(file, line, what))


def verify(path: Path, key: "PublicKey | None" = None, anchor: Anchor | None = None) -> VerificationReport:
    """Check every line of every file: content, order, chain, signatures, and the tail if something shows it."""
    saved = saved_links(path.parent / STREAMS)  # before the log, which may grow meanwhile
    report = VerificationReport(signatures_checked=key is not None)
    evidence = {f"a state in {STREAMS}/ was saved after": saved}
    evidence |= {"the anchor was made of": {anchor.sequence: anchor.hash}} if anchor else {}
    resumed, set_back, time = 0, 0, ""
    for raw, line, wrong in checked_lines(path, key):
        if raw.torn:
            report.torn = LineProblem(raw.file, raw.number, f"is torn after {len(raw.text)} bytes")
            continue
        report.lines += raw.whole
        if line is not None:
            report.anchor_checked |= anchor is not None and line["sequence"] == anchor.sequence
            wrong += [
                f"is not the line that {what}: history was rewritten or exchanged"
                for what, hashes in evidence.items()
                if hashes.get(line["sequence"], line["hash"]) != line["hash"]
            ]
            if line["kind"] == RECOVERED and len(report.notes) < MOST_LISTED:
                size, digest = line["body"].get("torn_bytes"), line["body"].get("torn_sha256")
                about = f"a torn end of {size} bytes was moved aside here (sha-256 {digest})"
                report.notes.append(f"{raw.file}, line {raw.number}: {about}.")
            resumed, set_back = resumed + (line["kind"] == RESUMED), set_back + (line["time"] < time)
            time, report.head, report.key = line["time"], Anchor.of(line), line["key"]
        for what in wrong:
            report.add(raw.file, raw.number, what)
    _check_files(path, report)
    _check_tail(report, key, anchor, saved)
    notes = {
        "The log is empty.": report.head is None,
        f"{path.name} itself is not there: the writer was killed while it rotated, or the file was removed.": (
            not path.is_file()
        ),
        "The lines are not signed: anyone who can write the files can rewrite all of them unnoticed.": (
            report.head is not None and report.key is None
        ),
        "The signatures were not checked: give the site's public key.": report.key is not None and key is None,
        "No anchor was given, so lines cut from the end are not noticed.": anchor is None,
        f"{resumed} time(s) the log could not be written for a while; 'resumed' lines say when.": resumed > 0,
        f"{set_back} time(s) the clock was set back between two lines.": set_back > 0,
    }
    report.notes += [note for note, holds in notes.items() if holds]
    return report


def _check_files(path: Path, report: VerificationReport) -> None:
    numbers = rotated_numbers(path)
    for number in sorted(set(range(1, max(numbers, default=0))) - set(numbers)):
        report.add(rotated_file(path, number).name, 0, "is missing")
    opening = opening_of(path)
    report.log = opening.get("log")
    if is_exchanged(opening, path):
        report.add(path.name, 0, f"is the log of {opening['folder']}, not of {path.absolute().parent.name}: exchanged")


def _check_tail(
    report: VerificationReport, key: "PublicKey | None", anchor: Anchor | None, saved: Mapping[int, str]
) -> None:
    last = -1 if report.head is None else report.head.sequence
    if last < max(saved, default=-1):
        what = f"the log ends with number {last}, but a state was saved after number {max(saved)}: the tail was cut"
        report.add(STREAMS, 0, what)
    if anchor is None:
        return
    if key is not None and not (anchor.key == key.id and key.fits(anchor.hash, anchor.signature or "")):
        report.add("the anchor", 0, f"was not signed with the key {key.id}: fetch it again from where it was stored")
    if not report.anchor_checked:
        what = f"the log ends with number {last}, but the anchor is of number {anchor.sequence}: the tail was cut"
        if last > anchor.sequence:
            what = f"the line with number {anchor.sequence}, which the anchor was made of, is missing"
        report.add("the log", 0, what)


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
