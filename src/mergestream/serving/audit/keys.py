"""Ed25519 key pairs in PEM files, as openssl writes them: the private key signs lines, the public one verifies them."""

import hashlib
from pathlib import Path

from mergestream.runtime.errors import InputError
from mergestream.runtime.key_files import create_key_pair, load_private_key, read_pem

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
except ImportError as missing:
    raise InputError("Keys need the library cryptography. Run: pip install 'mergestream[serve]'.") from missing

NOT_PEM = "is not a PEM key. Make a key pair with 'mergestream audit key'."


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
    return create_key_pair(file, Ed25519PrivateKey.generate)


def read_private_key(file: Path) -> PrivateKey:
    private = load_private_key(file, NOT_PEM, "; a service starts without a password. Decrypt it.")
    if not isinstance(private, Ed25519PrivateKey):
        raise InputError(f"{file} is not an Ed25519 key. Make one with 'mergestream audit key'.")
    return PrivateKey(private)


def read_public_key(file: Path) -> PublicKey:
    pem = read_pem(file, NOT_PEM)
    if b"PRIVATE KEY" in pem:
        raise InputError(f"{file} is the private key, which should not leave the service. Verify with {file.name}.pub.")
    try:
        public = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{file} is not a readable public key. Ask the site for it again.") from error
    if not isinstance(public, Ed25519PublicKey):
        raise InputError(f"{file} is not an Ed25519 key. Ask the site for the '.pub' file of its audit key.")
    return PublicKey(public)
