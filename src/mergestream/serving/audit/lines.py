"""One line of the log: canonical JSON that holds the hash of the line before it, its own hash and a signature."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mergestream.runtime.errors import InputError, OutputError
from mergestream.serving.audit.keys import Signer, Verifier

SCHEMA_VERSION = 1
LONGEST = 16 * 2**20  # bytes of a line; whoever reads a log never holds more than this in memory
ROTATION, RECOVERED, RESUMED = "rotation", "recovered", "resumed"
OWN_KINDS = (ROTATION, RECOVERED, RESUMED)  # written by the log itself
TEXT = (str,)
TEXT_OR_NULL = (str, type(None))
FIELDS: dict[str, tuple[type, ...]] = {
    "body": (dict,),
    "hash": TEXT,
    "key": TEXT_OR_NULL,
    "kind": TEXT,
    "previous": TEXT,
    "schema_version": (int,),
    "sequence": (int,),
    "signature": TEXT_OR_NULL,
    "time": TEXT,
}


class AuditError(OutputError):
    """A log that cannot be written or read: what was not written is never said to be."""


class LineError(ValueError):
    """Bytes that are no line of a log, and why."""


@dataclass(frozen=True)
class Link:
    """A place in the chain: the last line so far."""

    sequence: int
    hash: str


BEGINNING = Link(-1, "0" * 64)


def canonical(value: Any) -> str:
    """The one spelling of a JSON value: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def encoded_body(body: Mapping[str, Any]) -> str:
    """A body in its canonical spelling; what would be spelt otherwise once it is read back is refused."""
    try:
        text = canonical(body)
        # Keys that are numbers become text and then sort otherwise.
        faithful = text.startswith("{") and canonical(json.loads(text)) == text
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"The body of an audit line must be JSON: {error}.") from error
    if not faithful:
        raise InputError("The body of an audit line must be a dict, and all keys in it text.")
    if len(text) > LONGEST - 2**12:
        raise InputError(f"The body of an audit line has {len(text)} bytes; {LONGEST - 2**12} are allowed.")
    return text


def checked_kind(kind: str) -> str:
    if not re.fullmatch(r"[a-z][a-z_]{0,39}", kind) or kind in OWN_KINDS:
        raise InputError(f"'{kind}' cannot be the kind of an audit line: small letters, and none of {OWN_KINDS}.")
    return kind


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def seal(kind: str, body: str, after: Link, signer: Signer | None) -> tuple[str, Link]:
    """The next line, without its newline, and its place in the chain. `body` is in its canonical spelling."""
    texts = {
        "body": body,
        "key": canonical(signer.key if signer else None),
        "kind": canonical(kind),
        "previous": canonical(after.hash),
        "schema_version": canonical(SCHEMA_VERSION),
        "sequence": canonical(after.sequence + 1),
        "time": canonical(now()),
    }
    link = Link(after.sequence + 1, _sha256(_object(texts)))
    texts["hash"] = canonical(link.hash)
    texts["signature"] = canonical(signer.sign(link.hash) if signer else None)
    return _object(texts), link


def _object(texts: Mapping[str, str]) -> str:
    """An object of values that are spelt already, so that a long body is spelt only once."""
    return "{" + ",".join(f'"{name}":{texts[name]}' for name in sorted(texts)) + "}"


def parse(raw: bytes) -> dict[str, Any]:
    """A line without its newline; any other spelling of the same content is refused too."""
    try:
        text = raw.decode("ascii")
        line = json.loads(text)
        faithful = canonical(line) == text
    except (ValueError, RecursionError) as error:
        raise LineError("is not JSON: changed, or damaged by a disk") from error
    if not isinstance(line, dict) or line.keys() != FIELDS.keys():
        raise LineError("has not the fields of an audit line")
    if line["schema_version"] != SCHEMA_VERSION:
        raise LineError(f"has schema_version {line['schema_version']!r}; this mergestream reads {SCHEMA_VERSION}")
    if not faithful or any(type(line[name]) not in types for name, types in FIELDS.items()):
        raise LineError("is not spelt as this log spells a line: it was changed")
    return line


def faults(line: Mapping[str, Any], verifier: Verifier | None) -> list[str]:
    """What is wrong with a parsed line by itself: its hash, its key, its signature."""
    content = {name: value for name, value in line.items() if name not in ("hash", "signature")}
    if _sha256(canonical(content)) != line["hash"]:
        return ["was changed: its hash does not fit its content"]
    if (line["key"] is None) != (line["signature"] is None):
        return ["names a key without a signature, or a signature without a key"]
    if verifier is None:
        return []
    if line["key"] != verifier.key:
        return [f"is {_signed_by(line['key'])}, not signed with the key {verifier.key}"]
    fits = verifier.fits(line["hash"], line["signature"])
    return [] if fits else [f"has a signature that the key {verifier.key} did not make: someone without it wrote it"]


def _signed_by(key: str | None) -> str:
    return "not signed at all" if key is None else f"signed with the key {key}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()
