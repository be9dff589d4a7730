"""Authentication by a file with one line per token (role, name, sha-256). Removing a line revokes its token at once."""

import hashlib
import hmac
import logging
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from mergestream.runtime.errors import InputError, OutputError
from mergestream.runtime.files import error_text
from mergestream.runtime.option_checks import one_of

CLIENT, ADMINISTRATOR = "client", "administrator"
ROLES = (CLIENT, ADMINISTRATOR)
ANYONE, HEALTH = "anyone", "health check"  # routes without a token; health checks also have no limits
LINE = re.compile(
    r"(?P<role>client|administrator) +(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]{0,63}) +(?P<sha256>[0-9a-f]{64})"
)
LARGEST_FILE = 1 << 20
log = logging.getLogger(__name__)


class Holder(NamedTuple):
    """Role and name of a token's holder."""

    role: str
    name: str


# Without tokens, which is allowed on loopback only, every caller is an administrator.
EVERYONE = Holder(ADMINISTRATOR, "loopback")


class Tokens:
    """The tokens of a file, read again whenever it changes. If the file is missing or damaged, no token is valid."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._version: tuple[int, ...] | None = None
        self._entries: list[tuple[bytes, Holder]] = []
        require_private(file, 0o022, "Others on this machine may write tokens into it.")
        wrong = self._refresh()
        if wrong:
            raise InputError(f"{file}, line {wrong[0]}: not 'role name sha256'. Make tokens with 'serve-token'.")
        if not self._entries:
            raise InputError(f"{file} holds no token. Make one with 'mergestream serve-token'.")

    def holder_of(self, token: str) -> Holder | None:
        """The holder of a token, or None. Takes the same time for every token."""
        self._refresh()
        presented, result = _sha256(token), None
        for sha256, holder in self._entries:
            if hmac.compare_digest(sha256, presented):
                result = holder
        return result

    def _refresh(self) -> list[int]:
        """Read the file if it has changed. Return the numbers of malformed lines, which grant nothing."""
        try:
            status = self._file.stat()
            version = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
            if version == self._version:
                return []
            lines = self._file.read_text(encoding="utf-8")[:LARGEST_FILE].splitlines()
        except (OSError, UnicodeDecodeError) as error:
            if self._version is not None:
                log.error("the tokens file cannot be read, so every token is refused: %s", type(error).__name__)
            self._version, self._entries = None, []
            return []
        self._entries, wrong = _entries(lines)
        self._version = version
        if wrong:
            log.error("malformed lines in the tokens file: %s", wrong)
        return wrong


def create_token(file: Path, role: str, name: str) -> str:
    """Make a token and add its line to the file. The token itself is stored nowhere."""
    one_of("role", role, ROLES)
    token = secrets.token_urlsafe(32)
    line = f"{role} {name} {_sha256(token).decode()}"
    if not LINE.fullmatch(line):
        raise InputError("A token's name has 1 to 64 letters, digits, '.', '-' and '_'. Name a device, not a person.")
    try:
        content = file.read_text(encoding="utf-8") if file.exists() else ""
        if any(holder.name == name for _, holder in _entries(content.splitlines())[0]):
            raise InputError(f"{file} holds a token called '{name}'. Remove its line to revoke it, or choose another.")
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(("\n" if content and not content.endswith("\n") else "") + line + "\n")
    except OSError as error:
        raise OutputError(f"Cannot write {file}: {error_text(error)}.") from error
    return token


def _entries(lines: list[str]) -> tuple[list[tuple[bytes, Holder]], list[int]]:
    """Tokens, and the numbers of malformed lines."""
    entries, wrong = [], []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        matched = LINE.fullmatch(text)
        if matched:
            entries.append((matched["sha256"].encode(), Holder(matched["role"], matched["name"])))
        elif text and not text.startswith("#"):
            wrong.append(number)
    return entries, wrong


def require_private(file: Path, forbidden: int, why: str) -> None:
    """Refuse a file whose mode has one of the forbidden bits."""
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error_text(error)}.") from error
    if mode & forbidden:
        raise InputError(f"{file}: {why} Run: chmod 600 {file}")


def _sha256(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest().encode()
