"""Keys, certificates and a signed pool of micro networks, for the suites about trust."""

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import mergestream as ms
from conftest import CLASSES, with_statistics
from mergestream.networks.architecture import create_network
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.expert_card import ExpertCard, read_card
from mergestream.pool.pool_folder import write_order
from mergestream.pool.trust.signatures import create_signing_key, sign_expert

NOW = datetime.datetime.now(datetime.UTC)
ARGUMENTS = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
DAY = datetime.timedelta(days=1)


def make_key(folder: Path, name: str) -> Path:
    """A private key FOLDER/NAME; its public half is in FOLDER/trusted/NAME.pub."""
    folder.mkdir(parents=True, exist_ok=True)
    private, public = create_signing_key(folder / name)
    (folder / "trusted").mkdir(exist_ok=True)
    public.rename(folder / "trusted" / public.name)
    return private


def signed_pool(folder: Path, key: Path, names: tuple[str, ...] = ("lyon", "brest")) -> Path:
    """A pool with its base and statistics, every folder signed with one key."""
    for number, name in enumerate(("base", *names)):
        write_micro_expert(folder / name, number, None if name == "base" else folder / "base")
    write_order(folder, names)
    with_statistics(ms.ExpertPool.load(folder)).save(folder)
    for name in (*names, "base"):
        (folder / name / "README.md").write_text(f"# {name}\n\nA card for people.\n")
        sign_expert(folder / name, key)
    return folder


def write_micro_expert(folder: Path, seed: int, base: Path | None) -> Path:
    """An expert of a named network that its card can build."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = create_network("vit_tiny_patch16_224", num_classes=len(CLASSES), **ARGUMENTS)
        torch.nn.init.normal_(network.module.head.weight, std=0.3)
    sha256 = None if base is None else read_card(base).weights_sha256
    card = ExpertCard.for_network(folder.name, network, CLASSES, domain=None if base is None else folder.name)
    write_expert(folder, network.module.state_dict(), replace(card, base_sha256=sha256))
    return folder


def make_authority(folder: Path, name: str = "authority") -> tuple[Any, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    own = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = _issued(own, key.public_key(), own, key, NOW - 400 * DAY, NOW + 400 * DAY, authority=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return key, certificate


def issue(folder: Path, name: str, authority: tuple[Any, Any], days: tuple[int, int] = (-1, 1)) -> tuple[Path, Path]:
    """A private key and its certificate by an authority, valid from and until these days."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    begin, end = (NOW + days[0] * DAY, NOW + days[1] * DAY)
    certificate = _issued(subject, key.public_key(), authority[1].subject, authority[0], begin, end)
    folder.mkdir(parents=True, exist_ok=True)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private, issued = folder / f"{name}.key", folder / f"{name}.crt"
    private.write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    private.chmod(0o600)
    issued.write_bytes(certificate.public_bytes(pem))
    return private, issued


def _issued(subject: Any, public: Any, issuer: Any, key: Any, begin: Any, end: Any, authority: bool = False) -> Any:
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign", "encipher_only",
         "decipher_only"), False,
    )  # fmt: skip
    about = x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, **usage)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
    builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    return builder.add_extension(about, critical=True).sign(key, hashes.SHA256())
