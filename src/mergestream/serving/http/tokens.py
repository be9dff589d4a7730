"""Who may ask: a file with one line a token (role, name, sha-256). Removing the line revokes the token at once."""

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from mergestream.runtime.errors import InputError, OutputError
from mergestream.runtime.files import error_text
from mergestream.runtime.option_checks import one_of

CLIENT, ADMINISTRATOR = "client", "administrator"
ROLES = (CLIENT, ADMINISTRATOR)
LINE = re.compile(
    r"(?P<role>client|administrator) +(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]{0,63}) +(?P<sha256>[0-9a-f]{64})"
)
LARGEST_FILE = 1 << 20
log = logging.getLogger(__name__)


class Holder(NamedTuple):
    """Whom a token was given to."""

    role: str
    name: str


# Where no tokens are configured, which only loopback allows, whoever can reach the service administers it.
EVERYONE = Holder(ADMINISTRATOR, "loopback")


class Tokens:
    """The tokens of a file, read again whenever it changes. A file that is gone or damaged lets nobody in."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read_at: tuple[int, ...] | None = None
        self._entries: list[tuple[bytes, Holder]] = []
        _require_private(file)
        wrong = self._refresh()
        if wrong:
            raise InputError(f"{file}, line {wrong[0]}: not 'role name sha256'. Make tokens with 'serve-token'.")
        if not self._entries:
            raise InputError(f"{file} holds no token, so nobody could ask. Make one with 'mergestream serve-token'.")

    def holder_of(self, token: str) -> Holder | None:
        """Compared with every entry, each in constant time, so that the time tells nothing."""
        self._refresh()
        presented, found = _sha256(token), None
        for sha256, holder in self._entries:
            if hmac.compare_digest(sha256, presented):
                found = holder
        return found

    def _refresh(self) -> list[int]:
        """Read the file if it changed; answers the numbers of lines that are no tokens, which grant nothing."""
        try:
            about = self._file.stat()
            stands = (about.st_mtime_ns, about.st_ctime_ns, about.st_size, about.st_ino)
            if stands == self._read_at:
                return []
            lines = self._file.read_text(encoding="utf-8")[:LARGEST_FILE].splitlines()
        except (OSError, UnicodeDecodeError) as error:
            if self._read_at is not None:
                log.error("the tokens cannot be read, so nobody is let in: %s", type(error).__name__)
            self._read_at, self._entries = None, []
            return []
        self._entries, wrong = _entries(lines)
        self._read_at = stands
        if wrong:
            log.error("lines of the tokens' file that are no tokens: %s", wrong)
        return wrong


def create_token(file: Path, role: str, name: str) -> str:
    """Add a line to the file, which is made if it is missing; the token itself is in no file."""
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
    """Tokens, and the numbers of lines that are neither one nor empty nor a comment."""
    found, wrong = [], []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        matched = LINE.fullmatch(text)
        if matched:
            found.append((matched["sha256"].encode(), Holder(matched["role"], matched["name"])))
        elif text and not text.startswith("#"):
            wrong.append(number)
    return found, wrong


def _require_private(file: Path) -> None:
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError as error:
        raise InputError(f"The tokens {file} cannot be read: {error_text(error)}.") from error
    if mode & 0o022:
        raise InputError(f"Others on this machine may write tokens into {file}. Run: chmod 600 {file}")


def _sha256(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest().encode()
