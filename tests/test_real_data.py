"""PACS and MIDOG as published, through training and the real command line; skipped where the data are not at hand."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mergestream as ms
from benching import command, contents
from mergestream.networks.architecture import create_network
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.expert_card import BASE, ExpertCard
from mergestream.runtime.seeding import seeded
from mergestream.training import Recipe, train_expert

pytestmark = pytest.mark.slow
REAL = Path(__file__).parent.parent.parent / "shared" / "data"
MICRO = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 2}
SETS = {"pacs": ("pacs-128.zip", 9991), "midog": ("midog25-64.zip", 11935)}


@pytest.fixture(scope="module", params=list(SETS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A small expert of every domain, from one random start: enough to be different and better than chance."""
    name, (file, _) = request.param, SETS[request.param]
    if not (REAL / file).exists():
        pytest.skip(f"{file} is not at hand: it lies in ../shared/data beside the checkout")
    folder = tmp_path_factory.mktemp(name)
    dataset = ms.load_dataset(name, root=REAL / file, size=32, interpolation="bicubic")
    with seeded(0):
        start = create_network("vit_tiny_patch16_224", num_classes=len(dataset.classes), **MICRO)
    write_expert(folder / BASE, start.module.state_dict(), ExpertCard.for_network(BASE, start, dataset.classes))
    recipe = Recipe(
        steps=150, batch_size=32, learning_rate=1e-3, augmentation=0, validate_every=50, accelerator="cpu"
    )  # fmt: skip
    for domain in dataset:
        card = train_expert(folder / domain.replace(" ", "_"), folder / BASE, dataset[domain], recipe)
        assert card.domain == domain
    return name, folder, REAL / file


def line(trained: tuple[str, Path, Path], out: Path) -> list[str]:
    name, pool, root = trained
    streams = ["--streams", "iid,dirichlet:0.05", "--seeds", "0", "--jobs", "2"]
    methods = ["--methods", "entropy_adaptive,mean,ensemble"]
    return ["bench", "--dataset", name, "--root", str(root), "--pool", str(pool), "--out", str(out), *streams, *methods]


def test_two_folders_and_a_killed_one_hold_the_same_bits(trained: tuple[str, Path, Path], tmp_path: Path) -> None:
    name, _, _ = trained
    one, two = tmp_path / "one", tmp_path / "two"
    done = command(*line(trained, one))
    assert done.returncode == 0, done.stderr
    process = subprocess.Popen(
        [sys.executable, "-m", "mergestream", *line(trained, two)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    while len(list((two / "runs").glob("[!.]*"))) < 10:
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    total = len(contents(one))
    assert 10 <= len(list((two / "runs").glob("[!.]*"))) < total
    assert command(*line(trained, two)).returncode == 0
    assert contents(two) == contents(one)
    results = json.loads((one / "results.json").read_text())
    runs = [ms.Run.load(folder) for folder in (one / "runs").glob("[!.]*")]
    answered = {run.arguments["data"]["domain"]: len(run.labels) for run in runs}
    assert sum(answered.values()) == SETS[name][1]
    rows = {(row["label"], row["stream"]): row for row in results["results"]}
    if name == "midog":
        assert set(rows["mean", "iid"]["per_target"]) == set(answered)
        assert {row["kind"] for row in results["subgroups"]} == {"tumor", "scanner", "origin", "species"}
    else:
        assert rows["ensemble", "iid"]["balanced_accuracy"]["mean"] > 1 / 7
        assert 27.0 <= 32 * results["majority_shares"]["dirichlet:0.05"] <= 29.0
