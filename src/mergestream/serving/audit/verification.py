"""Reading a log from its first line to its last and saying everything that is wrong, one line in memory at a time."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mergestream.serving.audit.anchors import Anchor
from mergestream.serving.audit.keys import Verifier
from mergestream.serving.audit.lines import BEGINNING, RECOVERED, RESUMED, LineError, Link, faults, parse
from mergestream.serving.audit.log_files import Raw, raw_lines, rotated_file, rotated_numbers

MOST_LISTED = 100
TORN = "A killed writer leaves this, of a line that nobody was told is written; or it is being written now."


@dataclass(frozen=True)
class Finding:
    """Something about one line. `line` counts from 1 in its file; 0 is the file as a whole."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.what}" if self.line else f"{self.file}: {self.what}"


@dataclass
class Report:
    """What verification found. `sound`: no problem; a torn last line and the notes are none."""

    problems: list[Finding] = field(default_factory=list)  # the first of them
    problem_count: int = 0
    torn: Finding | None = None
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


def verify(path: Path, verifier: Verifier | None = None, anchor: Anchor | None = None) -> Report:
    """Check every line of every file: content, order, chain and signatures, and the tail where there is an anchor."""
    check = _Check(verifier, anchor)
    for raw in raw_lines(path):
        check.take(raw)
    numbers = rotated_numbers(path)
    for number in sorted(set(range(1, max(numbers, default=0))) - set(numbers)):
        check.problem(rotated_file(path, number).name, 0, "is missing")
    check.finish(path)
    return check.report


class _Check:
    def __init__(self, verifier: Verifier | None, anchor: Anchor | None) -> None:
        self.verifier, self.anchor = verifier, anchor
        self.report = Report(signatures_checked=verifier is not None)
        self.last: Link = BEGINNING
        self.time = ""
        self.file = ""
        self.resumed = 0
        self.set_back = 0

    def problem(self, file: str, line: int, what: str) -> None:
        self.report.problem_count += 1
        if len(self.report.problems) < MOST_LISTED:
            self.report.problems.append(Finding(file, line, what))

    def take(self, raw: Raw) -> None:
        self.file = raw.file
        if raw.torn:
            self.report.torn = Finding(raw.file, raw.number, f"is torn after {len(raw.text)} bytes")
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
        for what in (*faults(line, self.verifier), *self._breaks(line)):
            self.problem(raw.file, raw.number, what)
        self._remember(line, raw)

    def _breaks(self, line: dict[str, Any]) -> list[str]:
        """Where this line does not go on from the one before it."""
        expected, found = self.last.sequence + 1, line["sequence"]
        if found > expected:
            missing = str(expected) if found == expected + 1 else f"{expected} to {found - 1}"
            return [f"has number {found}, and nothing sound with number {missing} comes before it: removed or moved"]
        if found < expected:
            return [f"has number {found} where {expected} belongs: repeated, inserted or moved"]
        if line["previous"] != self.last.hash:
            return ["does not hold the hash of the line before it: one of the two was exchanged"]
        if self.verifier is None and self.report.head is not None and line["key"] != self.report.key:
            return [f"changes the key from {self.report.key or 'none'} to {line['key'] or 'none'}"]
        return []

    def _remember(self, line: dict[str, Any], raw: Raw) -> None:
        if self.anchor is not None and line["sequence"] == self.anchor.sequence:
            self.report.anchor_checked = True
            if line["hash"] != self.anchor.hash:
                self.problem(raw.file, raw.number, "is not the line the anchor was made of: history was rewritten")
        if line["kind"] == RECOVERED and len(self.report.notes) < MOST_LISTED:
            size, digest = line["body"].get("torn_bytes"), line["body"].get("torn_sha256")
            self.report.notes.append(
                f"{raw.file}, line {raw.number}: a torn end of {size} bytes was put aside here (sha-256 {digest})."
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
            "The lines are not signed: whoever can write the files can rewrite all of it unseen.": (
                self.report.head is not None and self.report.key is None
            ),
            "The signatures were not checked: give the site's public key or secret.": (
                self.report.key is not None and self.verifier is None
            ),
            "No anchor was given, so lines cut from the end cannot be seen.": self.anchor is None,
            f"{self.resumed} time(s) the log could not be written for a while; it tells where.": self.resumed > 0,
            f"{self.set_back} time(s) the clock was set back between two lines.": self.set_back > 0,
        }
        self.report.notes += [note for note, holds in notes.items() if holds]

    def _finish_anchor(self) -> None:
        if self.anchor is None:
            return
        if fault := self.anchor.fault(self.verifier):
            self.problem("the anchor", 0, fault)
        if not self.report.anchor_checked:
            reached, known = self.last.sequence, self.anchor.sequence
            what = f"the log ends with number {reached}, but the anchor knows number {known}: the tail was cut"
            if reached > known:
                what = f"the line with number {known}, which the anchor was made of, is not there"
            self.problem(self.file or "the log", 0, what)


def in_words(report: Report) -> list[str]:
    """What is wrong, what stands out, and the verdict last."""
    rest = report.problem_count - len(report.problems)
    verdict = f"Sound: {report.lines} lines." if report.sound else f"NOT sound: {report.problem_count} problem(s)."
    return [
        *(f"Wrong: {problem}" for problem in report.problems),
        *([f"Wrong: {rest} more."] if rest else []),
        *([f"Torn: {report.torn}. {TORN}"] if report.torn else []),
        *(f"Note: {note}" for note in report.notes),
        verdict,
    ]
