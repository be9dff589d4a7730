"""Key pairs (P-256 in PEM files, as openssl writes them), and signatures over every file of an expert's folder.

model-signing writes them as `model.sig` beside the files.
"""

import hashlib
import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergestream.pool.checkpoint import EXPERT_FILES, SIGNATURE, WEIGHTS, open_weights
from mergestream.pool.expert_card import CARD, ExpertCard
from mergestream.runtime.errors import InputError, MissingPathError, SignatureError
from mergestream.runtime.files import write_atomically
from mergestream.runtime.key_files import create_key_pair, load_private_key, public_pem, read_pem

MISSING = "Signatures need the library {}. Run: pip install 'mergestream[trust]'."
NOT_PEM = "is not a PEM file. Make a key pair with 'mergestream pool key'."
CURVES = ("secp256r1", "secp384r1", "secp521r1")  # those that model-signing takes


def create_signing_key(file: Path) -> tuple[Path, Path]:
    """Write a new private key (mode 0600) and its public half as FILE.pub. Nothing is ever overwritten."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as error:
        raise InputError(MISSING.format(error.name)) from error
    return create_key_pair(file, lambda: ec.generate_private_key(ec.SECP256R1()))


def key_hint(key: Any) -> str:
    """What a signature names its key by."""
    return hashlib.sha256(public_pem(key)).hexdigest()


def require_signing_key(file: Path) -> None:
    """Refuse a file that is not the private half of an elliptic-curve key, or that everyone may read."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    private = load_private_key(file, NOT_PEM, ". Decrypt it, or sign with another one.")
    if not isinstance(private, EllipticCurvePrivateKey) or private.curve.name not in CURVES:
        raise InputError(
            f"{file} is not an elliptic-curve key of {', '.join(CURVES)}. Make one with 'mergestream pool key'."
        )


def sign_expert(folder: Path, key: Path, certificate: Path | None = None, chain: Sequence[Path] = ()) -> Path:
    """Sign an expert's folder, a base or a merged model with a private key; an old signature is replaced.

    `certificate` and `chain`: the key's own certificate, and those between it and an authority.
    """
    if not folder.exists():
        raise MissingPathError(f"There is nothing at {folder}.")
    require_plain(folder)
    open_weights(folder, ExpertCard.read(folder))
    return _sign(folder, folder / SIGNATURE, key, certificate, chain)


def sign_file(file: Path, key: Path, certificate: Path | None = None, chain: Sequence[Path] = ()) -> Path:
    """Sign one file; the signature lies beside it as FILE.sig."""
    return _sign(file, signature_of(file), key, certificate, chain)


def signature_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.sig")


def _sign(model: Path, target: Path, key: Path, certificate: Path | None, chain: Sequence[Path]) -> Path:
    config = library("signing").Config().set_hashing_config(hashing())
    require_signing_key(key)
    if chain and certificate is None:
        raise InputError("--chain belongs to a certificate: give --certificate, too.")
    try:
        if certificate is None:
            config.use_elliptic_key_signer(private_key=key)
        else:
            for file in (certificate, *chain):
                read_pem(file, NOT_PEM)
            # model-signing cannot read an empty chain; the certificate itself in it does no harm.
            links = chain or [certificate]
            config.use_certificate_signer(private_key=key, signing_certificate=certificate, certificate_chain=links)
        with tempfile.TemporaryDirectory() as scratch:
            config.sign(model, Path(scratch) / SIGNATURE)
            signature = (Path(scratch) / SIGNATURE).read_bytes()
    except (ValueError, OSError) as error:
        raise InputError(f"{model} cannot be signed with {key}: {error}") from error
    write_atomically(target, lambda path: path.write_bytes(signature))
    return target


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
            raise SignatureError(f"{path} is no part of an expert: its files are {', '.join(EXPERT_FILES)}. Remove it.")
    for name in (WEIGHTS, CARD):
        if not (folder / name).is_file():
            raise SignatureError(f"{folder / name} is missing. Ask the site for the whole expert folder.")


def library(module: str) -> Any:
    """A module of model-signing, imported where it is used."""
    try:
        return importlib.import_module(f"model_signing.{module}")
    except ModuleNotFoundError as error:
        raise InputError(MISSING.format(error.name)) from error
