"""A site whose own images lack a class of the pool: it trains, takes part in a choice, and has no say on the class."""

import shutil
from pathlib import Path

import pytest
import torch

import mergestream as ms
from benching import NETWORK, command
from mergestream.data.datasets.standins.drawing import CLASSES, SITES, write_folder, write_table
from mergestream.methods.seen_classes import SeenClasses
from mergestream.runtime.errors import DataError

LACKING, SITE = "normal", "lyon"


def line(kind: str, data: Path, out: Path, *more: str) -> list[str]:
    network = [word for name, value in NETWORK.items() for word in ("--arg", f"{name}={value}")]
    fixed = ["--network", "vit_tiny_patch16_224", "--init", "random", "--steps", "4", "--batch-size", "8"]
    group = ["--data-option", "group=none"] if kind == "folder" else []
    rest = ["--validate-every", "2", "--jobs", "1", "--out", str(out), *more]
    return ["train", "--dataset", kind, "--root", str(data), *group, *fixed, *network, *rest]


def own_images(kind: str, folder: Path) -> Path:
    """The site's own disk: its images alone, without those of the class."""
    if kind == "folder":
        write_folder(folder)
        for site in set(SITES) - {SITE}:
            shutil.rmtree(folder / site)
        shutil.rmtree(folder / SITE / LACKING)
        return folder
    write_table(folder)
    (file,) = folder.glob("*.csv")
    head, *rows = file.read_text().splitlines()
    place, label = head.split(",").index("domain"), head.split(",").index("label")
    own = [row for row in rows if row.split(",")[place] == SITE and row.split(",")[label] != LACKING]
    assert own
    file.write_text("\n".join([head, *own]) + "\n")
    return folder


@pytest.mark.parametrize("kind", ["folder", pytest.param("table", marks=pytest.mark.slow)])
def test_it_trains_from_the_pools_base_and_has_no_say_on_the_class(kind: str, tmp_path: Path) -> None:
    write_table(tmp_path / "all")
    made = command(*line("table", tmp_path / "all", tmp_path / "pool"))
    assert made.returncode == 0, made.stderr
    data, site = own_images(kind, tmp_path / "own"), tmp_path / "site"
    shutil.copytree(tmp_path / "pool" / "base", site / "base")
    refused = command(*line(kind, data, site, "--domain", SITE))
    assert refused.returncode == 1
    assert f"has no image of the class '{LACKING}'" in refused.stderr
    assert "--allow-missing-classes" in refused.stderr
    done = command(*line(kind, data, site, "--domain", SITE, "--allow-missing-classes", "--loss", "weighted"))
    assert done.returncode == 0, done.stderr
    replaced = command("pool", "replace", str(tmp_path / "pool"), str(site / SITE))
    assert replaced.returncode == 0, replaced.stderr
    pool = ms.ExpertPool.load(tmp_path / "pool")
    assert pool.classes == CLASSES
    assert pool.cards[pool.index(SITE)].class_counts[LACKING] == 0
    mask = SeenClasses.of(pool).mask
    assert mask is not None
    assert (~mask).nonzero().tolist() == [[pool.index(SITE), CLASSES.index(LACKING)]]
    assert_no_say(pool)
    part = ("choose", str(tmp_path / "pool"), "--dataset", kind, "--root", str(data), "--site", SITE)
    group = ("--data-option", "group=none") if kind == "folder" else ()
    chosen = command(*part, *group, "--allow-missing-classes", "--out", str(tmp_path / "part.json"))
    assert chosen.returncode == 0, chosen.stderr


def assert_no_say(pool: ms.ExpertPool) -> None:
    """The expert's own logit of the class changes nothing."""
    bank = pool.bank.clone()
    bias = pool.layout.views(bank[pool.index(SITE)])["head.bias"]
    bias[CLASSES.index(LACKING)] += 5.0
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before, after = (ms.create_method("ensemble", each)(images) for each in (pool, pool._with(bank=bank)))
    assert torch.allclose(before, after, atol=1e-5)
    bias[0] += 5.0
    assert not torch.allclose(before, ms.create_method("ensemble", pool._with(bank=bank))(images), atol=1e-3)


def test_a_folder_of_a_class_that_the_pool_lacks_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(DataError, match=r"has folders of other classes \('normal'\) than"):
        ms.load_dataset("folder", str(tmp_path), group="none", classes=("benign", "malignant"))
