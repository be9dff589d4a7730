"""Key pairs in PEM files, as openssl writes them: made, read, and refused with a sentence."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mergestream.runtime.errors import InputError, TakenPathError
from mergestream.runtime.files import error_text, write_new

LARGEST_FILE = 2**20


def create_key_pair(file: Path, generate: Callable[[], Any]) -> tuple[Path, Path]:
    """Write a new private key (mode 0600) and its public half as FILE.pub. Nothing is ever overwritten."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    public_file = file.with_name(f"{file.name}.pub")
    for path in (file, public_file):
        if path.exists() or path.is_symlink():
            raise TakenPathError(f"{path} exists, and a lost key cannot be made again. Choose another name.")
    private = generate()
    write_new(file, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    write_new(public_file, public_pem(private.public_key()), 0o644)
    return file, public_file


def public_pem(key: Any) -> bytes:
    """A public key in the only form that model-signing hashes."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    content: bytes = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return content


def read_pem(file: Path, otherwise: str) -> bytes:
    """The content of a PEM file. `otherwise`: what the refusal says of any other file."""
    try:
        with file.open("rb") as opened:
            content = opened.read(LARGEST_FILE)
    except OSError as error:
        raise InputError(f"The key {file} cannot be read: {error_text(error)}.") from error
    if not content.lstrip().startswith(b"-----BEGIN"):
        raise InputError(f"{file} {otherwise}")
    return content


def load_private_key(file: Path, otherwise: str, if_encrypted: str) -> Any:
    """The private key in a file, of any kind; a public one, or one that everyone may read, is refused."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = read_pem(file, otherwise)
    if b"PUBLIC KEY" in content:
        raise InputError(f"{file} is a public key, which cannot sign. Give the private one, without '.pub'.")
    if stat.S_IMODE(file.stat().st_mode) & 0o007:
        raise InputError(f"Everyone on this machine may read the key {file}. Run: chmod 600 {file}")
    try:
        return load_pem_private_key(content, password=None)
    except TypeError as error:
        raise InputError(f"The key {file} is encrypted{if_encrypted}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{file} is not a readable private key. Restore it from your copy.") from error
