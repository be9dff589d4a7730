"""Lines of the log, as canonical JSON with hashes and a signature, and the files that hold them, oldest first."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from mergestream.runtime.errors import InputError, OutputError
from mergestream.runtime.files import error_text
from mergestream.serving.audit.line_kinds import OPENED, OWN_KINDS

if TYPE_CHECKING:
    from mergestream.serving.audit.keys import PrivateKey, PublicKey

SCHEMA_VERSION = 1
LONGEST = 16 * 2**20  # bytes; a reader never holds more than one line in memory
TEXTS, TEXTS_OR_NULL = ("hash", "kind", "previous", "time"), ("key", "signature")
TYPES = {"body": dict, "schema_version": int, "sequence": int, **dict.fromkeys(TEXTS, str)}
FIELDS = {*TYPES, *TEXTS_OR_NULL}


class AuditError(OutputError):
    """The audit log cannot be written or read."""


class LineError(ValueError):
    """Bytes that are not a line of a log; the message continues 'line 7 …'."""


Link = Mapping[str, Any]  # a line's place in the chain: its sequence and hash, maybe its time, or the whole line
BEGINNING: Link = {"sequence": -1, "hash": "0" * 64}


def link_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line's place, for answers and state files; of {}, where no log is kept, with nulls."""
    return {name: line.get(name) for name in BEGINNING}


class Encoded(str):
    """Canonical JSON that was encoded before, to be put into a body as it is."""

    __slots__ = ()


# Encodes a JSON value in its only allowed form: sorted keys, no spaces, ASCII, no NaN.
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def encoded_body(body: Mapping[str, Any]) -> str:
    """Encode a body; refuse one that would change by being read back and encoded again."""
    try:
        if not isinstance(body, dict) or not _all_keys_are_text(body):
            raise InputError("The body of an audit line must be a dict, and all keys in it text.")
        text = _object({name: value if type(value) is Encoded else canonical(value) for name, value in body.items()})
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"The body of an audit line must be JSON: {error}.") from error
    if len(text) > LONGEST - 2**12:
        raise InputError(f"The body of an audit line has {len(text)} bytes; {LONGEST - 2**12} are allowed.")
    return text


def _all_keys_are_text(value: Any) -> bool:
    """Whether no key anywhere is a number: those become text in JSON, and then sort differently."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_all_keys_are_text, value.values()))
    return not isinstance(value, list | tuple) or all(map(_all_keys_are_text, value))


def checked_kind(kind: str) -> str:
    if not re.fullmatch(r"[a-z][a-z_]{0,39}", kind) or kind in OWN_KINDS:
        raise InputError(f"'{kind}' cannot be the kind of an audit line: small letters, and none of {OWN_KINDS}.")
    return kind


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def seal(kind: str, body: str, after: Link, key: "PrivateKey | None") -> tuple[str, Link]:
    """Make the next line, without its newline, and its place in the chain. `body` is canonical JSON."""
    sequence, time = after["sequence"] + 1, now()
    texts = {
        "body": body,
        "key": canonical(key.id if key else None),
        "kind": canonical(kind),
        "previous": canonical(after["hash"]),
        "schema_version": canonical(SCHEMA_VERSION),
        "sequence": canonical(sequence),
        "time": canonical(time),
    }
    line_hash = _sha256(_object(texts))
    texts["hash"] = canonical(line_hash)
    texts["signature"] = canonical(key.sign(line_hash) if key else None)
    return _object(texts), {"sequence": sequence, "hash": line_hash, "time": time}


def _object(texts: Mapping[str, str]) -> str:
    """Join values that are already encoded, so that a long body is encoded only once."""
    return "{" + ",".join(f"{canonical(name)}:{texts[name]}" for name in sorted(texts)) + "}"


def parse(raw: bytes) -> dict[str, Any]:
    """Read a line without its newline. Any other encoding of the same content is refused, too."""
    try:
        text = raw.decode("ascii")
        line = json.loads(text)
        is_canonical = canonical(line) == text
    except (ValueError, RecursionError) as error:
        raise LineError("is not JSON: changed, or damaged by a disk") from error
    if not isinstance(line, dict) or line.keys() != FIELDS:
        raise LineError("does not have the fields of an audit line")
    if line["schema_version"] != SCHEMA_VERSION:
        raise LineError(f"has schema_version {line['schema_version']!r}; this mergestream reads {SCHEMA_VERSION}")
    texts = all(line[name] is None or type(line[name]) is str for name in TEXTS_OR_NULL)
    if not is_canonical or not texts or any(type(line[name]) is not kind for name, kind in TYPES.items()):
        raise LineError("is not in canonical form: it was changed")
    return line


def faults(line: Mapping[str, Any], key: "PublicKey | None") -> list[str]:
    """Check a parsed line by itself: hash, key and signature."""
    content = {name: value for name, value in line.items() if name not in ("hash", "signature")}
    if _sha256(canonical(content)) != line["hash"]:
        return ["was changed: its hash does not match its content"]
    if (line["key"] is None) != (line["signature"] is None):
        return ["names a key without a signature, or a signature without a key"]
    if key is None:
        return []
    if line["key"] != key.id:
        signed = "not signed at all" if line["key"] is None else f"signed with the key {line['key']}"
        return [f"is {signed}, not signed with the key {key.id}"]
    fits = key.fits(line["hash"], line["signature"])
    return [] if fits else [f"has a signature that was not made with the key {key.id}"]


def last_line_of(file: Path, key: "PublicKey | None" = None, size: int | None = None) -> dict[str, Any] | None:
    """The last whole line of a file, or of its first `size` bytes, if there is one; AuditError if it was changed."""
    text = tail_of(file, size)[0]
    if text is None:
        return None
    try:
        line = parse(text)
        wrong = faults(line, key)
    except LineError as error:
        wrong = [str(error)]
    if wrong:
        raise AuditError(f"The last line of {file} {wrong[0]}. Nothing was touched: run 'audit verify'.")
    return line


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class RawLine(NamedTuple):
    """A line as stored in a file, without its newline."""

    file: str
    number: int  # counted from 1
    text: bytes
    torn: bool  # it ends where the log ends, without a newline
    whole: bool


def rotated_file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number:06d}")


def rotated_numbers(path: Path) -> list[int]:
    pattern = re.compile(re.escape(path.name) + r"\.(\d{6,})")
    matches = (pattern.fullmatch(each.name) for each in path.parent.glob("*"))
    return sorted(int(match[1]) for match in matches if match)


def raw_lines(path: Path, *, recent: bool = False) -> Iterator[RawLine]:
    """Yield every line, also while a service writes to the log. `recent`: of the current file and the one before it."""
    try:
        with ExitStack() as stack:
            # Opened before the others are listed: a rotation in between renames it, but it stays the same file.
            current = _open_if_there(path)
            if current is not None:
                stack.enter_context(current)
            numbers = rotated_numbers(path)
            if current is None and not numbers:
                raise InputError(f"There is no audit log at {path}.")
            for number in numbers[-1:] if recent else numbers:
                with rotated_file(path, number).open("rb") as file:
                    if current is not None and os.path.samestat(os.fstat(file.fileno()), os.fstat(current.fileno())):
                        break
                    yield from _lines_of(file, rotated_file(path, number).name, last=False)
            if current is not None:
                yield from _lines_of(current, path.name, last=True)
    except OSError as error:
        raise AuditError(f"The audit log {path} cannot be read: {error_text(error)}.") from error


def _open_if_there(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:  # not asked before opening: a rotation may rename it in between
        return None


def _lines_of(file: BinaryIO, name: str, *, last: bool) -> Iterator[RawLine]:
    number = 0
    while text := file.readline(LONGEST + 1):
        number += 1
        whole = text.endswith(b"\n")
        yield RawLine(name, number, text.removesuffix(b"\n"), last and not whole and len(text) <= LONGEST, whole)


def last_line(path: Path, key: "PublicKey | None" = None) -> dict[str, Any] | None:
    """The last whole line of a log, if there is one, also while a service writes; AuditError if it was changed."""
    while True:
        numbers = rotated_numbers(path)
        files = (path, *(rotated_file(path, number) for number in reversed(numbers)))
        line = next((line for file in files if (line := last_line_of(file, key))), None)
        if rotated_numbers(path) == numbers:  # else a rotation may have moved the last line to a file not listed here
            return line


def opening_of(path: Path) -> dict[str, Any]:
    """What a log says about itself in its first line: id and folder; {} in a copy without its oldest file."""
    first = next(raw_lines(path), None)
    try:
        line = {} if first is None else parse(first.text)
    except LineError:
        return {}
    return line["body"] if line.get("kind") == OPENED else {}


def is_exchanged(opening: Mapping[str, Any], path: Path) -> bool:
    """Whether the log of one replica lies in the folder of another."""
    folders = (opening.get("folder"), path.absolute().parent.name)
    return folders[0] != folders[1] and all(re.fullmatch(r"engine-\d{3,}", str(name)) for name in folders)


def tail_of(path: Path, size: int | None = None) -> tuple[bytes | None, int, bytes]:
    """How a file, or its first `size` bytes, ends: the last whole line, where that ends, and what follows it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END) if size is None else size
            start = file.seek(max(0, size - 2 * LONGEST - 2))  # the longest line, and as much of a torn one
            whole, newline, torn = file.read(size - start).rpartition(b"\n")
    except FileNotFoundError:
        return None, 0, b""
    except OSError as error:
        raise AuditError(f"The audit log {path} cannot be read: {error_text(error)}.") from error
    before = whole.rfind(b"\n")
    if start and (not newline or before < 0):
        raise InputError(f"{path} is not an audit log: a line in it has more than {LONGEST} bytes.")
    return whole[before + 1 :] if newline else None, size - len(torn), torn
