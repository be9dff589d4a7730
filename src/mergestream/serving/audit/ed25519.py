"""Ed25519 keys in PEM files, as openssl writes and reads them."""

from pathlib import Path

from mergestream.runtime.errors import InputError
from mergestream.serving.audit.keys import fingerprint, message

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
    raise InputError(
        "Ed25519 keys need the library cryptography. Run: pip install 'mergestream[serve]'. HMAC keys need none."
    ) from missing


class PublicKey:
    """Verifies and cannot sign: what a regulator is given."""

    def __init__(self, public: Ed25519PublicKey) -> None:
        self._public = public
        self.key = f"ed25519:{fingerprint(public.public_bytes(Encoding.Raw, PublicFormat.Raw))}"

    def fits(self, line_hash: str, signature: str) -> bool:
        try:
            self._public.verify(bytes.fromhex(signature), message(line_hash))
        except (InvalidSignature, ValueError):
            return False
        # bytes.fromhex also takes capitals and spaces: one signature, one spelling.
        return bytes.fromhex(signature).hex() == signature


class PrivateKey(PublicKey):
    def __init__(self, private: Ed25519PrivateKey) -> None:
        super().__init__(private.public_key())
        self._private = private

    def sign(self, line_hash: str) -> str:
        return self._private.sign(message(line_hash)).hex()


def new_pair() -> tuple[bytes, bytes]:
    """A new private and public key, as PEM."""
    private = Ed25519PrivateKey.generate()
    return (
        private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    )


def private_key(pem: bytes, file: Path) -> PrivateKey:
    if b"PUBLIC KEY" in pem:
        raise InputError(f"{file} is a public key, which cannot sign. Give the private one, without '.pub'.")
    try:
        private = load_pem_private_key(pem, password=None)
    except TypeError as error:
        raise InputError(f"The key {file} is encrypted; a service starts without a password. Decrypt it.") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{file} is no private key that can be read. Restore it from your copy.") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise InputError(f"{file} is not an Ed25519 key. Make one with 'mergestream audit key'.")
    return PrivateKey(private)


def public_key(pem: bytes, file: Path) -> PublicKey:
    if b"PRIVATE KEY" in pem:
        raise InputError(f"{file} is the private key, which should not leave the service. Verify with {file.name}.pub.")
    try:
        public = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{file} is no public key that can be read. Ask the site for it again.") from error
    if not isinstance(public, Ed25519PublicKey):
        raise InputError(f"{file} is not an Ed25519 key. Ask the site for the '.pub' file of its audit key.")
    return PublicKey(public)
