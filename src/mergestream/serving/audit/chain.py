"""The chain of a log: each line continues the one before it, and states were saved after lines that are in it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.serving.audit.lines import (
    BEGINNING,
    AuditError,
    LineError,
    Link,
    RawLine,
    faults,
    last_line_of,
    link_of,
    parse,
    raw_lines,
    rotated_file,
    rotated_numbers,
)

if TYPE_CHECKING:
    from mergestream.serving.audit.keys import PublicKey

STREAMS = "streams"  # the folder with the states of the streams, beside the log
ADVICE = (
    "Nothing was restored. Find out who changed it ('mergestream audit verify') and put the log back as it was; or "
    "start with a new --state folder, where all streams begin anew, and keep this one."
)
# A line as stored, as read if it can be, and what is wrong with it.
CheckedLine = tuple[RawLine, dict[str, Any] | None, list[str]]


def checked_lines(
    path: Path, key: "PublicKey | None", before: Link | None = BEGINNING, *, recent: bool = False
) -> Iterator[CheckedLine]:
    """Check lines in their order: each by itself, and that it continues the one before it.

    `before`: the line before the first one; None: not there.
    """
    for raw in raw_lines(path, recent=recent):
        try:
            if not raw.whole:
                raise LineError("has no end: a newline was removed or changed")
            line = parse(raw.text)
        except LineError as error:
            yield raw, None, [str(error)]
            continue
        yield raw, line, [*faults(line, key), *([] if before is None else _breaks(line, before, key))]
        before = {**link_of(line), "key": line["key"]}  # not its body, which may be long


def _breaks(line: dict[str, Any], before: Link, key: "PublicKey | None") -> list[str]:
    expected, number = before["sequence"] + 1, line["sequence"]
    if number > expected:
        missing = str(expected) if number == expected + 1 else f"{expected} to {number - 1}"
        return [f"has number {number}, and nothing sound with number {missing} comes before it: removed or moved"]
    if number < expected:
        return [f"has number {number} where {expected} belongs: repeated, inserted or moved"]
    if line["previous"] != before["hash"]:
        return ["does not hold the hash of the line before it: one of the two was replaced"]
    if key is None and line["key"] != before.get("key", line["key"]):
        return [f"changes the key from {before['key'] or 'none'} to {line['key'] or 'none'}"]
    return []


def sound_lines(path: Path, key: "PublicKey | None" = None, *, recent: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log, or of its two newest files; AuditError at the first one that was changed.

    A whole log may be a copy without its oldest files: `verify` reports that they are missing.
    """
    before = _line_before_recent(path) if recent else None
    for raw, line, wrong in checked_lines(path, key, before, recent=recent):
        if raw.torn:
            return
        if line is None or wrong:
            raise AuditError(f"{raw.file}, line {raw.number} {wrong[0]}. Run 'audit verify' first.")
        yield line


def _line_before_recent(path: Path) -> Link | None:
    """The line before the newest rotated file; None if the file that it was in has been moved to an archive."""
    numbers = rotated_numbers(path)
    return last_line_of(rotated_file(path, numbers[-1] - 1)) if numbers and numbers[-1] > 1 else BEGINNING


def recent_lines(path: Path, key: "PublicKey | None", saved: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Yield the lines that a service restores its state from: of the current file and of the one before it.

    AuditError if one of them was changed, or if a line is missing that a state was saved after.
    """
    last = -1
    try:
        for line in sound_lines(path, key, recent=True) if path.is_file() or rotated_numbers(path) else ():
            last = line["sequence"]
            if saved.get(last, line["hash"]) != line["hash"]:
                raise AuditError(f"Line {last} is not the one that a state was saved after: rewritten or exchanged.")
            yield line
        if last < max(saved, default=-1):
            raise AuditError(
                f"It ends with line {last}, and a state was saved after line {max(saved)}: cut or emptied."
            )
    except AuditError as error:
        raise AuditError(f"The audit log {path} cannot be trusted: {error} {ADVICE}") from error


def saved_links(folder: Path) -> dict[int, str]:
    """Number and hash of the lines that states in this folder were saved after."""
    links = {}
    for file in sorted(folder.glob("*.json")):
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
            link = value.get("content", value)["audit"]
            links[int(link["sequence"])] = str(link["hash"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # damaged, or of a service without a log
    return links
