"""Key pairs that sign experts: elliptic curve P-256 in PEM files, as openssl writes them."""

import hashlib
import stat
from pathlib import Path
from typing import Any

from mergestream.runtime.errors import InputError, TakenPathError
from mergestream.runtime.files import error_text, write_new

MISSING = "Signatures need the library {}. Run: pip install 'mergestream[trust]'."
LARGEST_FILE = 2**20
CURVES = ("secp256r1", "secp384r1", "secp521r1")  # those that model-signing takes


def create_signing_key(file: Path) -> tuple[Path, Path]:
    """Write a new private key (mode 0600) and its public half as FILE.pub. Nothing is ever overwritten."""
    try:
        from cryptography.hazmat.primitives import serialization as forms
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as error:
        raise InputError(MISSING.format(error.name)) from error
    public_file = file.with_name(f"{file.name}.pub")
    for path in (file, public_file):
        if path.exists() or path.is_symlink():
            raise TakenPathError(f"{path} exists, and a lost key cannot be made again. Choose another name.")
    private = ec.generate_private_key(ec.SECP256R1())
    pem, plain = forms.Encoding.PEM, forms.NoEncryption()
    write_new(file, private.private_bytes(pem, forms.PrivateFormat.PKCS8, plain), 0o600)
    write_new(public_file, public_pem(private.public_key()), 0o644)
    return file, public_file


def public_pem(key: Any) -> bytes:
    """A public key in the only form that model-signing hashes."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    content: bytes = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return content


def key_hint(key: Any) -> str:
    """What a signature names its key by."""
    return hashlib.sha256(public_pem(key)).hexdigest()


def require_signing_key(file: Path) -> None:
    """Refuse a file that is not the private half of an elliptic-curve key, or that everyone may read."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = read_pem(file)
    if b"PUBLIC KEY" in content:
        raise InputError(f"{file} is a public key, which cannot sign. Give the private one, without '.pub'.")
    if stat.S_IMODE(file.stat().st_mode) & 0o007:
        raise InputError(f"Everyone on this machine may read the key {file}. Run: chmod 600 {file}")
    try:
        private = load_pem_private_key(content, password=None)
    except TypeError as error:
        raise InputError(f"The key {file} is encrypted. Decrypt it, or sign with another one.") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{file} is not a readable private key. Restore it from your copy.") from error
    if not isinstance(private, EllipticCurvePrivateKey) or private.curve.name not in CURVES:
        raise InputError(
            f"{file} is not an elliptic-curve key of {', '.join(CURVES)}. Make one with 'mergestream pool key'."
        )


def read_pem(file: Path) -> bytes:
    """The content of a PEM file; anything else is refused with a sentence."""
    try:
        with file.open("rb") as opened:
            content = opened.read(LARGEST_FILE)
    except OSError as error:
        raise InputError(f"The key {file} cannot be read: {error_text(error)}.") from error
    if not content.lstrip().startswith(b"-----BEGIN"):
        raise InputError(f"{file} is not a PEM file. Make a key pair with 'mergestream pool key'.")
    return content
