"""Key pairs (P-256 in PEM files, as openssl writes them), and signatures over every file of an expert's folder.

model-signing writes them as `model.sig` beside the files.
"""

import hashlib
import importlib
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mergestream.pool.checkpoint import EXPERT_FILES, SIGNATURE, WEIGHTS, open_weights
from mergestream.pool.expert_card import CARD, ExpertCard
from mergestream.runtime.errors import InputError, MissingPathError, SignatureError, TakenPathError
from mergestream.runtime.files import error_text, write_atomically, write_new

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


def sign_expert(folder: Path, key: Path, certificate: Path | None = None, chain: Sequence[Path] = ()) -> Path:
    """Sign an expert's folder, a base or a merged model with a private key; an old signature is replaced.

    `certificate` and `chain`: the key's own certificate, and those between it and an authority.
    """
    if not folder.exists():
        raise MissingPathError(f"There is nothing at {folder}.")
    require_plain(folder)
    open_weights(folder, ExpertCard.read(folder))
    signature = _signed(folder, key, certificate, chain)
    write_atomically(folder / SIGNATURE, lambda path: path.write_bytes(signature))
    return folder / SIGNATURE


def sign_file(file: Path, key: Path, certificate: Path | None = None, chain: Sequence[Path] = ()) -> Path:
    """Sign one file; the signature lies beside it as FILE.sig."""
    signature = _signed(file, key, certificate, chain)
    beside = signature_of(file)
    write_atomically(beside, lambda path: path.write_bytes(signature))
    return beside


def signature_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.sig")


def _signed(model: Path, key: Path, certificate: Path | None, chain: Sequence[Path]) -> bytes:
    config = library("signing").Config().set_hashing_config(hashing())
    require_signing_key(key)
    if chain and certificate is None:
        raise InputError("--chain belongs to a certificate: give --certificate, too.")
    try:
        if certificate is None:
            config.use_elliptic_key_signer(private_key=key)
        else:
            for file in (certificate, *chain):
                read_pem(file)
            # model-signing cannot read an empty chain; the certificate itself in it does no harm.
            links = chain or [certificate]
            config.use_certificate_signer(private_key=key, signing_certificate=certificate, certificate_chain=links)
        with tempfile.TemporaryDirectory() as scratch:
            config.sign(model, Path(scratch) / SIGNATURE)
            return (Path(scratch) / SIGNATURE).read_bytes()
    except (ValueError, OSError) as error:
        raise InputError(f"{model} cannot be signed with {key}: {error}") from error


def hashing() -> Any:
    """How files are hashed: sha-256 of each, none left out but the signature itself, links refused."""
    config = library("hashing").Config().use_file_serialization(hashing_algorithm="sha256")
    return config.set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def require_plain(folder: Path) -> None:
    """Refuse a folder that is not an expert's files and nothing else: no link, no other file, no folder in it."""
    if folder.is_symlink() or not folder.is_dir():
        raise SignatureError(f"{folder} is not a plain folder, so no signature covers it. Copy the expert itself.")
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise SignatureError(f"{path} is a link or a folder: a signature covers plain files only. Remove it.")
        if path.name not in (*EXPERT_FILES, SIGNATURE):
            raise SignatureError(f"{path} is no part of an expert: {_listed(EXPERT_FILES)}. Remove it.")
    for name in (WEIGHTS, CARD):
        if not (folder / name).is_file():
            raise SignatureError(f"{folder / name} is missing. Ask the site for the whole expert folder.")


def _listed(names: Iterable[str]) -> str:
    return "its files are " + ", ".join(names)


def library(module: str) -> Any:
    """A module of model-signing, imported where it is used."""
    try:
        return importlib.import_module(f"model_signing.{module}")
    except ModuleNotFoundError as error:
        raise InputError(MISSING.format(error.name)) from error
