"""Ed25519 key pairs in PEM files, as openssl writes them: the private key signs lines, the public one verifies them."""

import hashlib
import stat
from pathlib import Path

from mergestream.runtime.errors import InputError, TakenPathError
from mergestream.runtime.files import error_text, write_new

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
        load_pem_public_key,
    )
except ImportError as missing:
    raise InputError("Keys need the library cryptography. Run: pip install 'mergestream[serve]'.") from missing

LARGEST_FILE = 2**16


class PublicKey:
    """Verifies and cannot sign: what a regulator is given."""

    def __init__(self, public: Ed25519PublicKey) -> None:
        self._public = public
        raw = public.public_bytes(Encoding.Raw, PublicFormat.Raw)
        fingerprint = hashlib.sha256(b"mergestream audit key\n" + raw).hexdigest()[:16]
        self.id = f"ed25519:{fingerprint}"  # every signed line names it

    def fits(self, line_hash: str, signature: str) -> bool:
        """Whether the private half of this key made the signature."""
        try:
            self._public.verify(bytes.fromhex(signature), _message(line_hash))
        except (InvalidSignature, ValueError):
            return False
        # bytes.fromhex also takes capitals and spaces: one signature, one spelling.
        return bytes.fromhex(signature).hex() == signature


class PrivateKey(PublicKey):
    """Signs: what the service keeps."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        super().__init__(private.public_key())
        self._private = private

    def sign(self, line_hash: str) -> str:
        """The signature in hex digits."""
        return self._private.sign(_message(line_hash)).hex()


def _message(line_hash: str) -> bytes:
    """The line's hash, marked so that no signature made for another purpose fits."""
    return b"mergestream audit line\n" + line_hash.encode("ascii")


def create_key(file: Path) -> tuple[Path, Path]:
    """Write a new private key (mode 0600) and its public half as FILE.pub. Nothing is ever overwritten."""
    public_file = file.with_name(f"{file.name}.pub")
    for path in (file, public_file):
        if path.exists() or path.is_symlink():
            raise TakenPathError(f"{path} exists, and a lost key cannot be made again. Choose another name.")
    private = Ed25519PrivateKey.generate()
    write_new(file, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    write_new(public_file, public, 0o644)
    return file, public_file


def read_private_key(file: Path) -> PrivateKey:
    pem = _read(file, "PUBLIC KEY", "is a public key, which cannot sign. Give the private one, without '.pub'.")
    if stat.S_IMODE(file.stat().st_mode) & 0o007:
        raise InputError(f"Everyone on this machine may read the key {file}. Run: chmod 600 {file}")
    try:
        private = load_pem_private_key(pem, password=None)
    except TypeError as error:
        raise InputError(f"The key {file} is encrypted; a service starts without a password. Decrypt it.") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{file} is not a readable private key. Restore it from your copy.") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise InputError(f"{file} is not an Ed25519 key. Make one with 'mergestream audit key'.")
    return PrivateKey(private)


def read_public_key(file: Path) -> PublicKey:
    wrong = f"is the private key, which should not leave the service. Verify with {file.name}.pub."
    pem = _read(file, "PRIVATE KEY", wrong)
    try:
        public = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{file} is not a readable public key. Ask the site for it again.") from error
    if not isinstance(public, Ed25519PublicKey):
        raise InputError(f"{file} is not an Ed25519 key. Ask the site for the '.pub' file of its audit key.")
    return PublicKey(public)


def _read(file: Path, other_kind: str, wrong: str) -> bytes:
    try:
        with file.open("rb") as opened:
            content = opened.read(LARGEST_FILE)
    except OSError as error:
        raise InputError(f"The key {file} cannot be read: {error_text(error)}.") from error
    if not content.startswith(b"-----BEGIN"):
        raise InputError(f"{file} is not a PEM key. Make a key pair with 'mergestream audit key'.")
    if other_kind.encode() in content:
        raise InputError(f"{file} {wrong}")
    return content
