"""A site's key: HMAC-SHA256 with a secret both sides hold, or Ed25519, where a verifier needs only the public half."""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Protocol

from mergestream.runtime.errors import InputError, OutputError
from mergestream.runtime.files import error_text

SECRET_BYTES = 32
LARGEST_FILE = 2**16
PEM = b"-----BEGIN"


class Verifier(Protocol):
    """Knows whether the site's key signed a line's hash."""

    @property
    def key(self) -> str:
        """The id of the key, written into every line: its algorithm and a fingerprint."""
        ...

    def fits(self, line_hash: str, signature: str) -> bool: ...


class Signer(Verifier, Protocol):
    def sign(self, line_hash: str) -> str:
        """The signature in hex digits."""
        ...


def message(line_hash: str) -> bytes:
    """What is signed: the line's hash, marked so that no signature made for another purpose fits."""
    return b"mergestream audit line\n" + line_hash.encode("ascii")


def fingerprint(public: bytes) -> str:
    return hashlib.sha256(b"mergestream audit key\n" + public).hexdigest()[:16]


class HmacKey:
    """Whoever can verify with it can also sign: for a site that checks its own logs."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES:
            raise InputError(f"A secret of {len(secret)} bytes can be guessed; {SECRET_BYTES} or more are needed.")
        self._secret = secret
        self.key = f"hmac-sha256:{fingerprint(secret)}"

    def sign(self, line_hash: str) -> str:
        return hmac.digest(self._secret, message(line_hash), "sha256").hex()

    def fits(self, line_hash: str, signature: str) -> bool:
        return hmac.compare_digest(self.sign(line_hash).encode(), signature.encode("utf-8", "surrogatepass"))


def create_key(file: Path, *, ed25519: bool) -> list[Path]:
    """Write a new key with mode 0600, and for Ed25519 its public half as FILE.pub. Nothing is ever overwritten."""
    public = file.with_name(f"{file.name}.pub")
    for path in (file, public) if ed25519 else (file,):
        if path.exists() or path.is_symlink():
            raise OutputError(f"{path} exists, and a lost key cannot be made again. Choose another name.")
    if not ed25519:
        _write_new(file, f"{secrets.token_hex(SECRET_BYTES)}\n".encode(), 0o600)
        return [file]
    from mergestream.serving.audit.ed25519 import new_pair

    private_text, public_text = new_pair()
    _write_new(file, private_text, 0o600)
    _write_new(public, public_text, 0o644)
    return [file, public]


def read_signer(file: Path) -> Signer:
    """The key the service signs with: a secret, or an Ed25519 private key."""
    content = _read(file)
    if stat.S_IMODE(file.stat().st_mode) & 0o007:
        raise InputError(f"Everyone on this machine may read the key {file}. Run: chmod 600 {file}")
    if content.startswith(PEM):
        from mergestream.serving.audit.ed25519 import private_key

        return private_key(content, file)
    return _secret_in(content, file)


def read_verifier(file: Path) -> Verifier:
    """The key to verify with: the secret, or an Ed25519 public key."""
    content = _read(file)
    if content.startswith(PEM):
        from mergestream.serving.audit.ed25519 import public_key

        return public_key(content, file)
    return _secret_in(content, file)


def _secret_in(content: bytes, file: Path) -> HmacKey:
    try:
        return HmacKey(bytes.fromhex(content.decode("ascii").strip()))
    except (UnicodeDecodeError, ValueError) as error:
        raise InputError(
            f"{file} holds no key: neither PEM nor {2 * SECRET_BYTES} or more hex digits. "
            "Make one with 'mergestream audit key'."
        ) from error


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(LARGEST_FILE)
    except OSError as error:
        raise InputError(f"The key {file} cannot be read: {error_text(error)}.") from error


def _write_new(path: Path, content: bytes, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"Cannot write the key {path}: {error_text(error)}.") from error
