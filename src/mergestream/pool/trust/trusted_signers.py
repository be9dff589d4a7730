"""The signers that a site trusts, as a folder of public keys and certificates, and what they have signed."""

import base64
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mergestream.pool.checkpoint import SIGNATURE
from mergestream.pool.expert_card import TEXT, require_name
from mergestream.pool.trust import signatures
from mergestream.runtime.errors import InputError, SignatureError
from mergestream.runtime.files import error_text
from mergestream.runtime.key_files import LARGEST_FILE, read_pem


@dataclass(frozen=True)
class SignedFiles:
    """The signer of a folder, and the sha-256 of every file in it as signed."""

    signer: str
    sha256: Mapping[str, str]


class TrustedSigners:
    """Public keys, whose file names without suffix name the signers, and certificates of authorities.

    A signer with a certificate is named by the certificate's subject, as in 'CN=Lyon,O=Consortium'.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError(f"There is no folder {folder}. Give a folder with public keys and CA certificates.")
        signatures.library("verifying")  # here, with its sentence, if it is not installed
        self.folder = folder
        self._keys: dict[str, tuple[str, Path]] = {}  # by the hint in a signature
        self._authorities: list[Path] = []
        for file in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
            self._add(file)
        if not self._keys and not self._authorities:
            raise InputError(f"{folder} holds no public key and no certificate, so it trusts no one.")

    def _add(self, file: Path) -> None:
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
        from cryptography.x509 import load_pem_x509_certificates

        content = read_pem(file, signatures.NOT_PEM)
        if b"PRIVATE KEY" in content:
            raise InputError(f"{file} is a private key, which should not leave its site. Put in the '.pub' file.")
        try:
            if b"BEGIN CERTIFICATE" in content:
                load_pem_x509_certificates(content)
                self._authorities.append(file)
                return
            key = load_pem_public_key(content)
        except ValueError as error:
            raise InputError(f"{file} is not a readable public key or certificate. Ask the site again.") from error
        if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in signatures.CURVES:
            raise InputError(
                f"{file} is not a key that signs experts: ask the site for that of 'mergestream pool key'."
            )
        name = require_name(file.name.removesuffix(".pub").removesuffix(".pem").removesuffix(".key"))
        other = next((path for signer, path in self._keys.values() if signer == name), None)
        if other or signatures.key_hint(key) in self._keys:
            raise InputError(f"{file} repeats a signer: one key and one name per signer. Remove one of the two.")
        self._keys[signatures.key_hint(key)] = (name, file)

    def signed_expert(self, folder: Path) -> SignedFiles:
        """Check the signature over an expert's folder; refused with a sentence that says what is wrong.

        The hashes are of the bytes on disk now: whoever reads a file later must compare what was read with them.
        """
        signatures.require_plain(folder)
        content = _read_signature(folder / SIGNATURE, f"'{folder.name}' is not signed")
        try:
            measured = signatures.hashing().hash(folder)
        except (OSError, ValueError) as error:
            raise SignatureError(f"{folder} cannot be read: {error_text(error)}.") from error
        signer = self._verified(content, measured, folder)
        return SignedFiles(
            signer, {each.identifier: each.digest.digest_hex for each in measured.resource_descriptors()}
        )

    def signed_file(self, file: Path) -> tuple[str, bytes]:
        """Check the signature FILE.sig; the signer, and the bytes that were signed."""
        content = _read_signature(signatures.signature_of(file), f"{file} is not signed")
        if file.is_symlink():
            raise SignatureError(f"{file} is a link: a signature covers plain files only.")
        with tempfile.TemporaryDirectory() as scratch:
            # A copy, so that the bytes that are checked are those that are returned.
            copy = Path(scratch) / file.name
            copy.write_bytes(file.read_bytes())
            return self._verified(content, signatures.hashing().hash(copy), file), copy.read_bytes()

    def _verified(self, signature: bytes, measured: Any, what: Path) -> str:
        """The signer of these files; `measured` are their hashes."""
        from cryptography.exceptions import InvalidSignature

        bundle = _parsed(signature, what)
        config = signatures.library("verifying").Config().set_hashing_config(_Measured(measured))
        if bundle.hint is not None:
            signer = self._use_key(config, bundle.hint, what)
        else:
            signer = self._use_certificate(config, bundle.certificates, what)
        try:
            with tempfile.TemporaryDirectory() as scratch:
                # The library reads a file: one that nobody else can exchange.
                (Path(scratch) / SIGNATURE).write_bytes(signature)
                config.verify(what, Path(scratch) / SIGNATURE)
        except InvalidSignature as error:
            raise SignatureError(f"The signature of {what} by {signer} is not valid: it was changed.") from error
        except Exception as error:  # whatever a library does with bytes of a stranger, it is not a valid signature
            raise SignatureError(_mismatch(bundle.payload, measured, what, signer)) from error
        return signer

    def _use_key(self, config: Any, hint: str, what: Path) -> str:
        if hint not in self._keys:
            raise SignatureError(
                f"{what} is signed with the key {hint[:16]}…, which is not in {self.folder}: an unknown signer. "
                f"Put the site's public key there only if you got it from the site itself."
            )
        signer, file = self._keys[hint]
        config.use_elliptic_key_verifier(public_key=file)
        return signer

    def _use_certificate(self, config: Any, certificates: Sequence[bytes], what: Path) -> str:
        from cryptography.x509 import load_der_x509_certificate, load_pem_x509_certificates
        from OpenSSL import crypto

        try:
            chain = [load_der_x509_certificate(each) for each in certificates]
            subject = chain[0].subject.rfc4514_string()
        except Exception as error:  # a stranger's bytes: each library has errors of its own
            raise SignatureError(f"The signature of {what} holds no readable key or certificate.") from error
        if not TEXT.fullmatch(subject) or "=" not in subject:
            raise SignatureError(f"The certificate in the signature of {what} has no readable subject.")
        if not self._authorities:  # the library would trust those of the operating system
            raise SignatureError(
                f"{what} is signed by {subject}, but {self.folder} holds no certificate of an authority."
            )
        store = crypto.X509Store()
        for file in self._authorities:
            for certificate in load_pem_x509_certificates(file.read_bytes()):
                store.add_cert(crypto.X509.from_cryptography(certificate))
        try:
            linked = [crypto.X509.from_cryptography(each) for each in chain]
            # At the present time: model-signing checks a certificate at the moment when it began to be valid.
            for each in linked:
                crypto.X509StoreContext(store, each, linked).verify_certificate()
        except (crypto.X509StoreContextError, crypto.Error) as error:
            raise SignatureError(_untrusted(what, subject, str(error), self.folder)) from error
        config.use_certificate_verifier(certificate_chain=self._authorities)
        return subject


def trusted_signers(folder: str | Path | None) -> TrustedSigners | None:
    """The signers in a folder; None where no signature is required."""
    return None if folder is None else TrustedSigners(Path(folder))


class _Bundle(NamedTuple):
    """What a signature says about itself. Nothing of it is trusted before the library has checked it."""

    hint: str | None
    certificates: list[bytes]
    payload: bytes


class _Measured:
    """Hashes that were measured already, in the place of model-signing's own reading of the files."""

    def __init__(self, manifest: Any) -> None:
        self._manifest = manifest

    def hash(self, *_: object, **__: object) -> Any:
        return self._manifest

    def add_ignored_paths(self, **_: object) -> None:
        """A signature cannot leave files out: all of them were measured."""


def _read_signature(file: Path, unsigned: str) -> bytes:
    if not file.is_file() or file.is_symlink():
        raise SignatureError(f"{unsigned}: {file} is missing. Ask the site to sign it ('mergestream pool sign').")
    with file.open("rb") as opened:
        return opened.read(LARGEST_FILE)


def _parsed(signature: bytes, what: Path) -> _Bundle:
    from sigstore_models.bundle.v1 import Bundle

    try:
        text = signature.decode("utf-8")
        # One signature, one spelling: otherwise a byte could be changed in it without a trace.
        if Bundle.from_json(text).to_json() != text:
            raise ValueError("not as model-signing writes it")
        value = json.loads(text)
        material, envelope = value["verificationMaterial"], value["dsseEnvelope"]
        hint = material["publicKey"]["hint"] if "publicKey" in material else None
        chain = material.get("x509CertificateChain", {}).get("certificates", [])
        payload = base64.b64decode(envelope["payload"])
        if material["tlogEntries"] or [each["keyid"] for each in envelope["signatures"]] != [""]:
            raise ValueError("it holds what model-signing does not check")
        return _Bundle(hint, [base64.b64decode(each["rawBytes"]) for each in chain], payload)
    except Exception as error:  # a stranger's bytes: pydantic, JSON and base64 each have errors of their own
        raise SignatureError(
            f"The signature of {what} is damaged or was changed. Ask the site for it again."
        ) from error


def _untrusted(what: Path, subject: str, reason: str, folder: Path) -> str:
    if "expired" in reason:
        return f"{what} is signed by {subject}, whose certificate has expired. Ask the site to sign it again."
    if "not yet valid" in reason:
        return f"{what} is signed by {subject}, whose certificate is not valid yet. Check this machine's clock."
    return f"{what} is signed by {subject}, and no authority in {folder} vouches for it: an unknown signer."


def _mismatch(payload: bytes, measured: Any, what: Path, signer: str) -> str:
    """What differs between the files on disk and those that were signed."""
    try:
        signed = {each["name"]: each["digest"] for each in json.loads(payload)["predicate"]["resources"]}
    except (ValueError, KeyError, TypeError):
        return f"The signature of {what} by {signer} is not one of model-signing over files."
    present = {each.identifier: each.digest.digest_hex for each in measured.resource_descriptors()}
    missing, extra = sorted(signed.keys() - present.keys()), sorted(present.keys() - signed.keys())
    changed = sorted(name for name in signed.keys() & present.keys() if signed[name] != present[name])
    parts = [f"{', '.join(names)} {verb}" for names, verb in (
        (changed, "changed"), (missing, "missing"), (extra, "not among the signed files"),
    ) if names]  # fmt: skip
    detail = "; ".join(parts) or "the signature does not fit"
    return f"{what} is not as {signer} signed it: {detail}. Ask the site for it again."
