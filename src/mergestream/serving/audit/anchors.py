"""Anchors: number, hash and signature of the last line, stored elsewhere, so that a cut tail is noticed."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.files import read_json
from mergestream.serving.audit.lines import SCHEMA_VERSION, AuditError, LineError, faults, parse
from mergestream.serving.audit.log_files import last_line

if TYPE_CHECKING:
    from mergestream.serving.audit.keys import PublicKey

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
