"""A consortium from end to end: sites train alone, sign, exchange, verify and serve; what is not signed is refused."""

import io
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mergestream as ms
from benching import NETWORK, command
from live_service import LiveService
from mergestream.networks.architecture import create_network
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.trust.revocations import read_revocations
from mergestream.pool.trust.trusted_signers import TrustedSigners
from mergestream.runtime.errors import MergestreamError
from signing import make_key

pytestmark = pytest.mark.slow
FLIPS = 200
DATA = ("--dataset", "phantom", "--data-option", "images=150")


def done(*arguments: object) -> str:
    result = command(*map(str, arguments))
    assert result.returncode == 0, result.stderr
    return result.stdout


def make_base(folder: Path) -> None:
    """The start that all sites share."""
    classes = tuple(ms.load_dataset("phantom", images=150).classes)
    built = create_network("vit_tiny_patch16_224", num_classes=len(classes), **NETWORK)
    write_expert(folder, built.module.state_dict(), ExpertCard.for_network("base", built, classes))


def png(seed: int) -> bytes:
    pixels, file = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def train(pool: Path, site: str) -> Path:
    """The expert that a site trains alone, from the base in its own folder."""
    network = [f"--arg={name}={value}" for name, value in NETWORK.items()]
    quick = ["--steps", "6", "--batch-size", "8", "--validate-every", "3", "--jobs", "1", "--statistics", "8"]
    fixed = [*DATA, "--network", "vit_tiny_patch16_224", "--init", "random"]
    done("train", *fixed, *network, *quick, "--domain", site, "--out", pool)
    return pool / site


def refused(root: Path) -> bool:
    trusted = TrustedSigners(root / "trusted")
    try:
        for folder in sorted(path for path in (root / "pool").iterdir() if path.is_dir()):
            trusted.signed_expert(folder)
        read_revocations(root / "pool", trusted)
    except MergestreamError:
        return True
    return False


def signed_files(pool: Path) -> list[Path]:
    """Everything that sites exchange; pool.json is each site's own."""
    return sorted(path for path in pool.rglob("*") if path.is_file() and path.name != "pool.json")


def flip_everywhere(root: Path) -> None:
    """Change one byte at random places, each file as often as the others: every change is refused."""
    chance, files = random.Random(0), signed_files(root / "pool")
    assert not refused(root)
    for number in range(FLIPS):
        path = files[number % len(files)]
        content = path.read_bytes()
        place, change = chance.randrange(len(content)), chance.randrange(1, 256)
        path.write_bytes(content[:place] + bytes([content[place] ^ change]) + content[place + 1 :])
        assert refused(root), (path.name, place, change)
        if number % 50 == 0:
            verified = command("pool", "verify", str(root / "pool"), "--require-signed-by", str(root / "trusted"))
            assert verified.returncode == 1
        path.write_bytes(content)
    assert not refused(root)


def ask(service: LiveService, seed: int) -> dict[str, Any]:
    with service.client() as client:
        files = [("images", (f"{number}.png", png(seed + number))) for number in range(3)]
        answer = client.post("/v1/streams/ward/batches", files=files)
        assert answer.status_code == 200, answer.text
        return answer.json()


def test_a_consortium(tmp_path: Path) -> None:
    root, trusted = tmp_path, tmp_path / "trusted"
    first, second, third = list(ms.load_dataset("phantom", images=150))[:3]
    # Each site trains alone, from one base.
    make_base(root / "base")
    experts = {}
    for site in (first, second, third):
        shutil.copytree(root / "base", root / "sites" / site / "base")
        experts[site] = train(root / "sites" / site, site)
    keys = {site: make_key(root, site) for site in (first, second)}
    for site, key in keys.items():
        (experts[site] / "README.md").write_text(f"# {site}\n")
        done("pool", "sign", experts[site], "--key", key)
    shutil.copytree(root / "base", root / "pool" / "base")
    done("pool", "sign", root / "pool" / "base", "--key", keys[first])
    # They exchange folders; what nobody has signed stays out.
    required = ("--require-signed-by", trusted)
    for site in (first, second):
        assert f"signed by {site}" in done("pool", "add", root / "pool", experts[site], *required)
    unsigned = command("pool", "add", str(root / "pool"), str(experts[third]), *map(str, required))
    assert (unsigned.returncode, f"'{third}' is not signed" in unsigned.stderr) == (1, True)
    verified = json.loads(done("pool", "verify", root / "pool", *required, "--json"))
    assert verified["signed_by"] == {first: first, second: second, "base": first}
    # Each tells the others how the experts do on its own images.
    for site, key in keys.items():
        done("site-report", root / "pool", *DATA, "--domain", site, "--key", key, "--out", root / f"{site}.json")
    reports = [root / f"{site}.json" for site in keys]
    done("matrix", *reports, *required, "--out", root / "matrix.html")
    assert all(site in (root / "matrix.html").read_text() for site in keys)
    done("choose", root / "pool", *reports, "--join", *required)
    card_values = ms.create_method("corrected", ms.ExpertPool.load(root / "pool"), anchor="sites").card_values()
    assert len(card_values["bias"]) == 4
    # They serve; one is revoked while the service runs.
    with LiveService(root, root / "pool", "--guard", "fallback=none", "--require-signed-by", str(trusted)) as service:
        before = [ask(service, seed) for seed in (0, 10)]
        assert all(answer["encoder_coefficients"][second] > 0 for answer in before)
        reason = ("--reason", "Trained with swapped labels.")
        done("pool", "revoke", root / "pool", second, "--key", keys[first], *reason, *required)
        time.sleep(2.5)
        after = [ask(service, seed) for seed in (20, 30)]
        assert [answer["encoder_coefficients"][second] for answer in after] == [0, 0]
        with service.client() as client:
            listed = {each["name"]: each for each in client.get("/v1/pool").json()["experts"]}
        assert (listed[first]["signed_by"], listed[second]["signed_by"]) == (first, second)
        assert "swapped labels" in listed[second]["revoked"]
        assert service.stop() == 0
    touched = json.loads(done("audit", "touched", service.log, "--expert", second, "--json"))
    assert [each["sequence"] for each in touched["answers"]] == [answer["audit"]["sequence"] for answer in before]
    lines = [json.loads(line) for line in service.log.read_text().splitlines()]
    assert all(line["body"]["signed_by"] == [first, second] for line in lines if line["kind"] == "step")
    # One byte anywhere: in weights, cards, statistics, signatures and the list of revocations.
    assert {path.name for path in signed_files(root / "pool")} >= {
        "weights.safetensors", "expert.json", "statistics.safetensors", "model.sig", "revoked.json", "revoked.json.sig",
    }  # fmt: skip
    flip_everywhere(root)
    with pytest.raises(MergestreamError, match="was revoked"):
        ms.ExpertPool.load(root / "pool", require_signed_by=trusted)
