"""Signed experts: what a signature covers, who is trusted, and the sentence of each refusal."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mergestream as ms
from mergestream.pool.exchange.changes import add_expert, remove_expert, replace_expert, restore_expert
from mergestream.pool.exchange.pool_inspection import verify_pool
from mergestream.pool.parts import read_parts
from mergestream.pool.trust import trusted_signers as module
from mergestream.pool.trust.signatures import create_signing_key, sign_expert
from mergestream.pool.trust.trusted_signers import TrustedSigners
from mergestream.runtime.errors import InputError, MergestreamError, SignatureError
from mergestream.runtime.files import sha256_of_file
from signing import issue, make_authority, make_key, signed_pool


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("signed")
    signed_pool(root / "pool", make_key(root, "lyon-university"))
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """A signed pool, its key and the folder of trusted signers."""
    return shutil.copytree(template, tmp_path / "root")


def refused(root: Path) -> str:
    with pytest.raises(MergestreamError) as error:
        ms.ExpertPool.load(root / "pool", require_signed_by=root / "trusted")
    return str(error.value)


def scale_head(folder: Path, factor: float) -> None:
    """Scale the head and write the new hash into the card, as an attacker would."""
    state = load_file(folder / "weights.safetensors")
    state = {name: tensor * factor if name.startswith("head.") else tensor for name, tensor in state.items()}
    save_file(state, folder / "weights.safetensors")
    card = json.loads((folder / "expert.json").read_text())
    card["weights_sha256"] = sha256_of_file(folder / "weights.safetensors")
    (folder / "expert.json").write_text(json.dumps(card, indent=2))
    about = folder / "statistics.safetensors"
    about.unlink(missing_ok=True)


def test_a_signed_pool_has_the_same_bits_and_names_its_signers(root: Path) -> None:
    signed = ms.ExpertPool.load(root / "pool", require_signed_by=root / "trusted")
    plain = ms.ExpertPool.load(root / "pool")
    assert torch.equal(signed.bank, plain.bank)
    assert torch.equal(signed.base, plain.base)
    assert signed.fingerprint() == plain.fingerprint()
    for one, other in zip(signed.statistics, plain.statistics, strict=True):
        assert one.images == other.images
        assert all(torch.equal(one.tensors[key], other.tensors[key]) for key in other.tensors)
        assert one.tensors.keys() == other.tensors.keys()
    assert plain.signed_by is None
    assert signed.signed_by == {"lyon": "lyon-university", "brest": "lyon-university"}
    assert signed.without("lyon").signed_by == {"brest": "lyon-university"}


def test_a_scaled_head_with_a_new_hash_is_refused(root: Path) -> None:
    scale_head(root / "pool" / "brest", 100)
    assert ms.ExpertPool.load(root / "pool").names == ("lyon", "brest")  # as today
    assert "expert.json, weights.safetensors changed; statistics.safetensors missing" in refused(root)
    assert not verify_pool(root / "pool", root / "trusted").sound
    sent = shutil.copytree(root / "pool" / "brest", root / "sent" / "brest")
    remove_expert(root / "pool", "brest")
    with pytest.raises(SignatureError, match="is not as lyon-university signed it"):
        add_expert(root / "pool", sent, require_signed_by=root / "trusted")
    (sent / "model.sig").unlink()
    with pytest.raises(SignatureError, match="'brest' is not signed"):
        add_expert(root / "pool", sent, require_signed_by=root / "trusted")


FILES = ("weights.safetensors", "expert.json", "statistics.safetensors", "README.md", "model.sig")


def test_a_changed_or_missing_file_is_refused(root: Path) -> None:
    trusted = TrustedSigners(root / "trusted")
    for path in sorted(path for folder in ("lyon", "base") for path in (root / "pool" / folder).iterdir()):
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(SignatureError, match="was changed" if path.name == "model.sig" else f"{path.name} changed"):
            trusted.signed_expert(path.parent)
        path.unlink()
        with pytest.raises(SignatureError, match="missing"):
            trusted.signed_expert(path.parent)
        path.write_bytes(content)
    assert ms.ExpertPool.load(root / "pool", require_signed_by=root / "trusted").base is not None


def test_other_files_links_and_folders_are_refused(root: Path) -> None:
    lyon = root / "pool" / "lyon"
    (lyon / "notes.txt").write_text("hello")
    assert "is no part of an expert" in refused(root)
    (lyon / "notes.txt").unlink()
    (lyon / "more").mkdir()
    assert "is a link or a folder" in refused(root)
    (lyon / "more").rmdir()
    (lyon / "README.md").rename(root / "README.md")
    (lyon / "README.md").symlink_to(root / "README.md")
    assert "is a link or a folder" in refused(root)
    (lyon / "README.md").unlink()
    assert "README.md missing" in refused(root)
    (root / "README.md").rename(lyon / "README.md")
    sent = lyon.rename(root / "lyon")
    lyon.symlink_to(sent)
    assert "is not a plain folder" in refused(root)


def test_a_signature_of_another_expert_does_not_fit(root: Path) -> None:
    shutil.copy(root / "pool" / "brest" / "model.sig", root / "pool" / "lyon" / "model.sig")
    assert "lyon is not as lyon-university signed it: README.md, expert.json, " in refused(root)
    shutil.rmtree(root / "pool" / "lyon")
    shutil.copytree(root / "pool" / "brest", root / "pool" / "lyon")
    assert "is the card of 'brest'" in refused(root)


def test_unknown_signers_and_unsigned_experts_are_refused(root: Path, tmp_path: Path) -> None:
    sign_expert(root / "pool" / "brest", make_key(tmp_path / "elsewhere", "stranger"))
    assert "an unknown signer" in refused(root)
    (root / "pool" / "brest" / "model.sig").unlink()
    assert "'brest' is not signed" in refused(root)


def test_the_name_of_a_stranger_in_a_signature_helps_nobody(root: Path, tmp_path: Path) -> None:
    """A signature by a stranger that claims the key of a trusted signer."""
    path = root / "pool" / "brest" / "model.sig"
    own = json.loads(path.read_text())["verificationMaterial"]
    scale_head(root / "pool" / "brest", 100)
    sign_expert(root / "pool" / "brest", make_key(tmp_path / "elsewhere", "stranger"))
    forged = json.loads(path.read_text()) | {"verificationMaterial": own}
    path.write_text(json.dumps(forged, separators=(",", ":")))
    assert "is not valid: it was changed" in refused(root)


def test_certificates_name_their_subject_until_they_expire(root: Path) -> None:
    authority = make_authority(root / "trusted")
    key, certificate = issue(root / "issued", "Brest", authority)
    sign_expert(root / "pool" / "brest", key, certificate)
    pool = ms.ExpertPool.load(root / "pool", require_signed_by=root / "trusted")
    assert pool.signed_by == {"lyon": "lyon-university", "brest": "CN=Brest"}
    sign_expert(root / "pool" / "brest", *issue(root / "issued", "Past", authority, (-9, -3)))
    assert "CN=Past, whose certificate has expired" in refused(root)
    sign_expert(root / "pool" / "brest", *issue(root / "issued", "Future", authority, (3, 9)))
    assert "CN=Future, whose certificate is not valid yet" in refused(root)
    other = make_authority(root / "elsewhere")
    sign_expert(root / "pool" / "brest", *issue(root / "issued", "Stranger", other))
    assert "CN=Stranger, and no authority in" in refused(root)
    sign_expert(root / "pool" / "brest", key, certificate)
    (root / "trusted" / "authority.crt").unlink()
    assert "holds no certificate of an authority" in refused(root)  # and not the operating system's


def test_what_is_loaded_is_what_was_checked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is exchanged between the check and the reading, with size and times as before."""
    path = root / "pool" / "brest" / "weights.safetensors"
    before, times = path.read_bytes(), path.stat()
    check = TrustedSigners.signed_expert

    def exchanged(self: TrustedSigners, folder: Path) -> module.SignedFiles:
        files = check(self, folder)
        if folder.name == "brest":
            path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return files

    monkeypatch.setattr(TrustedSigners, "signed_expert", exchanged)
    assert "was changed after its signature was checked" in refused(root)
    monkeypatch.undo()
    path.write_bytes(before)
    parts = read_parts(root / "pool", None, "cpu", None, TrustedSigners(root / "trusted"))
    statistics = root / "pool" / "lyon" / "statistics.safetensors"
    statistics.write_bytes(statistics.read_bytes()[:-1] + b"x")  # read later
    with pytest.raises(SignatureError, match="after its signature was checked"):
        parts.read_statistics[0]()
    base = root / "pool" / "base" / "weights.safetensors"
    base.write_bytes(base.read_bytes()[:-1] + b"x")
    with pytest.raises(SignatureError, match="after its signature was checked"):
        parts.read_base()


def test_signed_experts_are_added_replaced_restored_and_removed_as_signed(root: Path) -> None:
    pool, trusted = root / "pool", root / "trusted"
    sent = shutil.copytree(pool / "brest", root / "sent" / "brest")
    assert remove_expert(pool, "brest") == 1
    assert ms.ExpertPool.load(pool, require_signed_by=trusted).names == ("lyon",)
    with pytest.raises(SignatureError, match="would change its card"):
        add_expert(pool, sent, name="nantes", require_signed_by=trusted)
    assert add_expert(pool, sent, require_signed_by=trusted).signed_by == "lyon-university"
    sign_expert(sent, make_key(root, "second"))  # the same expert, signed anew
    assert replace_expert(pool, sent, require_signed_by=trusted).signed_by == "second"
    assert restore_expert(pool, "brest", 1, require_signed_by=trusted).signed_by == "lyon-university"
    assert {path.name for path in (pool / "brest").iterdir()} == set(FILES)
    report = verify_pool(pool, trusted)
    assert report.sound
    assert report.to_json()["signed_by"] == dict.fromkeys(("lyon", "brest", "base"), "lyon-university")
    # Without the option the name may change; the signature of the old card is not kept.
    assert add_expert(pool, sent, name="nantes").signed_by is None
    assert not (pool / "nantes" / "model.sig").exists()


def test_candidates_must_be_signed_too(root: Path) -> None:
    shutil.copytree(root / "pool", root / "pool.candidates")
    (root / "pool.candidates" / "lyon" / "model.sig").unlink()
    pool = ms.ExpertPool.load(root / "pool", require_signed_by=root / "trusted")
    with pytest.raises(SignatureError, match="'lyon' is not signed"):
        pool.candidates  # noqa: B018
    assert any("'lyon' is not signed" in each for each in verify_pool(root / "pool", root / "trusted").problems)


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda folder: folder.rmdir(), "There is no folder"),
        (lambda folder: None, "trusts no one"),
        (lambda folder: create_signing_key(folder / "site"), "is a private key"),
        (lambda folder: (folder / "notes.txt").write_text("hello"), "is not a PEM file"),
        (lambda folder: (folder / "a.pub").write_text("-----BEGIN PUBLIC KEY-----\nx\n"), "is not a readable"),
        (lambda folder: (folder / "a.pub").mkdir(), "cannot be read"),
    ],
)
def test_a_folder_of_signers_must_hold_keys(tmp_path: Path, prepare: Callable, sentence: str) -> None:
    (tmp_path / "trusted").mkdir()
    prepare(tmp_path / "trusted")
    with pytest.raises(InputError, match=sentence):
        TrustedSigners(tmp_path / "trusted")


def test_keys_that_cannot_sign_are_refused(root: Path) -> None:
    key, lyon = root / "lyon-university", root / "pool" / "lyon"
    with pytest.raises(InputError, match="is a public key"):
        sign_expert(lyon, root / "trusted" / "lyon-university.pub")
    with pytest.raises(InputError, match="give --certificate"):
        sign_expert(lyon, key, None, [key])
    key.chmod(0o644)
    with pytest.raises(InputError, match="Everyone on this machine"):
        sign_expert(lyon, key)
    with pytest.raises(MergestreamError, match="exists"):
        create_signing_key(key)
    mine, certificate = issue(root / "issued", "Brest", make_authority(root / "other"))
    key.chmod(0o600)
    with pytest.raises(InputError, match="does not match"):
        sign_expert(lyon, key, certificate)
    sign_expert(lyon, mine, certificate)


@pytest.mark.slow
def test_the_library_s_own_command_verifies_a_folder(root: Path) -> None:
    command = [
        sys.executable, "-m", "model_signing", "verify", "key", str(root / "pool" / "lyon"),
        "--signature", str(root / "pool" / "lyon" / "model.sig"),
        "--public_key", str(root / "trusted" / "lyon-university.pub"),
    ]  # fmt: skip
    assert subprocess.run(command, check=False).returncode == 0
    (root / "pool" / "lyon" / "README.md").write_text("other")
    assert subprocess.run(command, check=False).returncode != 0
