"""mergestream pool …: experts taken in, refused, replaced, brought back, verified, imported and merged."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import mergestream as ms
from conftest import HandWritten, make_experts, make_images
from mergestream.cli import app as cli
from mergestream.networks.architecture import Architecture, create_network, from_module
from mergestream.pool import pool_folder
from mergestream.pool.checkpoint import Statistics, write_expert, write_statistics
from mergestream.pool.class_concepts import set_concepts
from mergestream.pool.exchange.changes import add_expert, replace_expert, restore_expert
from mergestream.pool.exchange.expert_checks import FACTOR, mean_lead, probes
from mergestream.pool.exchange.pool_inspection import verify_pool
from mergestream.pool.expert_card import ExpertCard, read_card
from mergestream.pool.pool_folder import candidates_folder
from mergestream.runtime import files
from mergestream.runtime.errors import InputError

ARGUMENTS = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
CLASSES = ("benign", "malignant", "other")
VALIDATION = {"validation": {"accuracy": 0.87, "nll": 0.4, "ece": 0.04}}
TIMM = ("--network", "vit_tiny_patch16_224", *(f"--arg={key}={value}" for key, value in ARGUMENTS.items()))


def network(seed: int, spread: float = 0.3) -> nn.Module:
    """A tiny ViT whose answers are about as sure as a validation loss of 0.4 says."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = create_network("vit_tiny_patch16_224", num_classes=len(CLASSES), **ARGUMENTS).module
        nn.init.normal_(module.head.weight, std=spread)
    return module.eval()


def site(root: Path, name: str, seed: int, base: Path | None = None, scale: float = 1.0, **details: object) -> Path:
    """The folder a site would send."""
    module = network(seed)
    with torch.no_grad():
        module.head.weight.mul_(scale)
        module.head.bias.mul_(scale)
    made = create_network("vit_tiny_patch16_224", num_classes=len(CLASSES), **ARGUMENTS)
    card = ExpertCard.for_network(name, made, CLASSES, domain=name, metrics=VALIDATION, class_counts={"benign": 5})
    if base is not None:
        card = replace(card, base_sha256=read_card(base).weights_sha256)
    write_expert(root / name, module.state_dict(), replace(card, **details))
    return root / name


@pytest.fixture(scope="module")
def pool_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template") / "pool"
    base = site(root, "base", 0, domain=None, metrics={}, class_counts={})
    for number, name in enumerate(("lyon", "brest", "turin"), start=1):
        site(root, name, number, base)
    (root / "pool.json").write_text(json.dumps({"schema_version": 1, "order": ["turin", "lyon", "brest"]}))
    return root


@pytest.fixture
def pool(pool_template: Path, tmp_path: Path) -> Path:
    """Three experts and their base; tests create site folders beside it."""
    return shutil.copytree(pool_template, tmp_path / "pool")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mergestream", "pool", *map(str, arguments)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False)


@pytest.fixture
def pool_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """The same command line in this process: exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mergestream", "pool", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return call


def edited(folder: Path, **changes: object) -> Path:
    path = folder / "expert.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Other weights, and a card whose hash fits them."""
    state = load_file(folder / "weights.safetensors")
    change(state)
    save_file(state, folder / "weights.safetensors")
    return edited(folder, weights_sha256=files.sha256_of_file(folder / "weights.safetensors"))


# --- the whole story, as it is typed ------------------------------------------------------------------------


def test_a_consortium_on_the_command_line(tmp_path: Path, pool_command: Callable[..., tuple]) -> None:
    def printed(*arguments: object) -> Any:
        code, out, err = pool_command(*arguments)
        assert (code, err) == (0, "")
        return json.loads(out) if "--json" in arguments else out

    base = site(tmp_path / "pool", "base", 0, domain=None, metrics={}, class_counts={})
    lyon, brest = (site(tmp_path / "sent", name, n, base) for n, name in enumerate(("lyon", "brest"), start=1))
    assert printed("add", tmp_path / "pool", lyon).startswith("'lyon' is in the pool: version 1")
    code, _, err = pool_command("add", tmp_path / "pool", lyon)
    assert (code, err.count("\n")) == (1, 1)
    assert "mergestream pool replace" in err
    assert printed("add", tmp_path / "pool", brest, "--json")["expert"] == "brest"
    newer = site(tmp_path / "newer", "lyon", 5, base)
    assert printed("replace", tmp_path / "pool", newer, "--json")["version"] == 2
    back = printed("restore", tmp_path / "pool", "lyon", "1", "--json")
    assert back["weights_sha256"] == read_card(lyon).weights_sha256
    listed = printed("list", tmp_path / "pool", "--json")
    assert [(e["name"], e["version"], len(e["kept_versions"])) for e in listed["experts"]] == [
        ("lyon", 3, 2),
        ("brest", 1, 0),
    ]
    assert printed("verify", tmp_path / "pool").startswith("Sound: 2 experts. Signatures were not checked")
    printed("merge", tmp_path / "pool", tmp_path / "both", "--method", "mean")
    torch.save(network(7).state_dict(), tmp_path / "seven.pth")
    printed("import", tmp_path / "seven.pth", tmp_path / "seven", *TIMM, "--classes", ",".join(CLASSES))
    assert pool_command("add", tmp_path / "pool")[0] == 2
    assert ms.ExpertPool.load(tmp_path / "pool").names == ("lyon", "brest")


@pytest.mark.slow
def test_an_expert_is_added_in_a_real_process(pool: Path, tmp_path: Path) -> None:
    added = run("add", pool, site(tmp_path / "sent", "graz", 9, pool / "base"))
    assert (added.returncode, added.stderr) == (0, "")
    assert added.stdout.startswith("'graz' is in the pool: version 1")


def test_every_command_explains_itself(pool_command: Callable[..., tuple]) -> None:
    for name in ("list", "add", "replace", "restore", "verify", "import", "merge"):
        code, out, _ = pool_command(name, "--help")
        assert code == 0
        assert "--json" in out


# --- add: what is taken in ----------------------------------------------------------------------------------


def test_the_new_one_comes_last_and_nothing_else_changes(pool: Path, tmp_path: Path) -> None:
    (pool / "notes.txt").write_text("ours")
    before = {path: path.stat().st_ino for path in pool.rglob("weights.safetensors")}
    graz = site(tmp_path / "sent", "graz", 9, pool / "base")
    taken = add_expert(pool, graz)
    assert (taken.expert, taken.version, taken.warnings) == ("graz", 1, ())
    assert json.loads((pool / "pool.json").read_text())["order"] == ["turin", "lyon", "brest", "graz"]
    assert ms.ExpertPool.load(pool).names == ("turin", "lyon", "brest", "graz")
    assert {path: path.stat().st_ino for path in before} == before  # linked, not copied
    assert (pool / "notes.txt").read_text() == "ours"
    for name in ("weights.safetensors", "expert.json"):
        assert (pool / "graz" / name).read_bytes() == (graz / name).read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".pool.") and path.is_dir()]


def test_a_copy_is_taken_not_a_link_to_the_sites_file(pool: Path, tmp_path: Path) -> None:
    graz = site(tmp_path / "sent", "graz", 9, pool / "base")
    add_expert(pool, graz)
    (graz / "weights.safetensors").write_bytes(b"later")
    assert verify_pool(pool).sound


def test_the_folder_may_have_any_name_and_the_expert_another(pool: Path, tmp_path: Path) -> None:
    sent = site(tmp_path / "sent", "lyon", 9, pool / "base").rename(tmp_path / "sent" / "parcel of May")
    assert add_expert(pool, sent, name="lyon-2").expert == "lyon-2"
    assert read_card(pool / "lyon-2").domain == "lyon"
    (sent / "thesis.txt").write_text("not for the pool")
    add_expert(pool, sent, name="lyon-3")
    names = sorted(path.name for path in (pool / "lyon-3").iterdir())
    assert names == ["README.md", "expert.json", "weights.safetensors"]
    assert (pool / "lyon-3" / "README.md").read_text().count("# lyon-3\n") == 1


def test_statistics_come_along_and_must_be_of_these_weights(pool: Path, tmp_path: Path) -> None:
    graz = site(tmp_path / "sent", "graz", 9, pool / "base")
    statistics = Statistics({"fisher_exact/head.bias": torch.ones(3)}, {"fisher_exact": 4})
    write_statistics(graz, statistics, read_card(pool / "lyon"))
    with pytest.raises(ms.MergestreamError, match="was measured with other weights"):
        add_expert(pool, graz)
    endless = {"fisher_exact/head.bias": torch.tensor([1.0, torch.inf, 1.0])}
    write_statistics(graz, replace(statistics, tensors=endless), read_card(graz))
    with pytest.raises(ms.MergestreamError, match=r"NaN or Inf in 'fisher_exact/head.bias'"):
        add_expert(pool, graz)
    write_statistics(graz, statistics, read_card(graz))
    add_expert(pool, graz)
    assert ms.ExpertPool.load(pool).statistics_of(3).images == {"fisher_exact": 4}


# --- add: what is refused -----------------------------------------------------------------------------------


def scaled_tensor(value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda state: state["head.bias"].fill_(value)


REFUSED = {
    "sha-256": (lambda f: (f / "weights.safetensors").write_bytes(b"x" * 64), "does not match the sha-256 in its card"),
    "missing": (lambda f: (f / "weights.safetensors").unlink(), "weights.safetensors is missing"),
    "no card": (lambda f: (f / "expert.json").unlink(), "expert.json is missing"),
    "pickle": (lambda f: (f / "weights.safetensors").rename(f / "weights.pt"), "is a pickle"),
    "order": (lambda f: edited(f, classes=["other", "benign", "malignant"]), "labels would silently mean other things"),
    "classes": (
        lambda f: edited(f, classes=["a", "b", "c"], class_counts={}),
        "differ in classes: a, b, c against benign",
    ),
    "architecture": (
        lambda f: edited(f, network={"library": "timm", "name": "resnet18", "arguments": {}}),
        "differ in network",
    ),
    "head": (lambda f: edited(f, head=["norm"]), "differ in head: norm against head"),
    "pixels": (
        lambda f: edited(
            f, preprocessing={"size": [16, 16], "interpolation": "bilinear", "mean": [0] * 3, "std": [1] * 3}
        ),
        "differ in preprocessing",
    ),
    "base": (lambda f: edited(f, base_sha256="0" * 64), "was not trained from this pool's base"),
    "nan": (lambda f: rewritten(f, scaled_tensor(float("nan"))), r"'head.bias' holds NaN or Inf"),
    "layout": (lambda f: rewritten(f, lambda s: s.pop("head.bias")), r"lacks 1 tensor\(s\): head.bias"),
    "shape": (lambda f: rewritten(f, lambda s: s.update({"head.bias": torch.zeros(4)})), "the network needs"),
    "name": (lambda f: edited(f, name="../lyon"), "cannot name an expert"),
    "base's name": (lambda f: edited(f, name="base"), "An expert cannot be called 'base'"),
    "version": (lambda f: edited(f, schema_version=99), "has schema_version 99"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_refusals_leave_the_pool_as_it_was(
    pool: Path, tmp_path: Path, pool_command: Callable[..., tuple], what: str
) -> None:
    damage, sentence = REFUSED[what]
    graz = site(tmp_path / "sent", "graz", 9, pool / "base")
    damage(graz)
    before = {path: path.read_bytes() for path in pool.rglob("*") if path.is_file()}
    code, out, err = pool_command("add", pool, graz)
    assert (code, out) == (2 if what == "no card" else 1, "")  # a folder without a card is no expert
    assert err.count("\n") == 1
    with pytest.raises(ms.MergestreamError, match=sentence):
        add_expert(pool, graz)
    assert {path: path.read_bytes() for path in pool.rglob("*") if path.is_file()} == before


def test_everything_wrong_is_told_at_once(pool: Path, tmp_path: Path) -> None:
    graz = edited(site(tmp_path / "sent", "graz", 9), base_sha256="0" * 64, classes=["b", "a", "c"], class_counts={})
    (graz / "weights.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(ms.MergestreamError, match=r"differ in classes.*pool's base.*sha-256"):
        add_expert(pool, graz)


def test_another_base_can_be_allowed_and_stays_on_record(pool: Path, tmp_path: Path) -> None:
    graz = site(tmp_path / "sent", "graz", 9, base_sha256="0" * 64)
    taken = add_expert(pool, graz, allow_other_base=True)
    assert "does not say that it started from this pool's base" in taken.warnings[0]
    assert len(ms.ExpertPool.load(pool)) == 4  # which refuses an expert of another base
    assert read_card(pool / "graz").recipe["other_base_sha256"] == "0" * 64
    assert verify_pool(pool).sound


def test_wrong_places_give_sentences(pool: Path, tmp_path: Path, pool_command: Callable[..., tuple]) -> None:
    graz = site(tmp_path / "sent", "graz", 9)
    for arguments, sentence in (
        (("add", tmp_path / "nowhere", graz), "There is no pool at"),
        (("add", pool, tmp_path / "nowhere"), "There is no folder"),
        (("list", tmp_path / "nowhere"), "There is no pool at"),
        (("verify", tmp_path / "nowhere"), "There is no pool at"),
        (("replace", pool, graz), "There is no expert in this pool called 'graz'"),
        (("restore", pool, "lion", 1), "Did you mean 'lyon'?"),
        (("add", pool / "lyon", graz), "is one expert's folder, not a pool"),
        (("restore", pool, "lyon", 3), "No version 3 of 'lyon' is kept beside this pool. Kept: none."),
        (("add", pool, graz, "--name", "a/b"), "cannot name an expert"),
    ):
        code, _, err = pool_command(*arguments)
        assert code == (1 if "cannot name" in sentence else 2)
        assert err.startswith("mergestream: ")
        assert err.count("\n") == 1
        assert sentence in err


def test_a_pool_begins_empty_or_with_its_base(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    lyon = site(tmp_path / "sent", "lyon", 1)
    assert add_expert(tmp_path / "pool", lyon).warnings == ()
    assert ms.ExpertPool.load(tmp_path / "pool").names == ("lyon",)


def test_a_network_of_ones_own_is_held_to_the_first_experts_tensors(tmp_path: Path) -> None:
    modules = make_experts(HandWritten)
    for name, module in modules.items():
        card = ExpertCard.for_network(name, from_module(module), ("a", "b", "c", "d", "e"))
        write_expert(tmp_path / "sent" / name, module.state_dict(), card)
    (tmp_path / "pool").mkdir()
    for name in modules:
        add_expert(tmp_path / "pool", tmp_path / "sent" / name)
    assert ms.ExpertPool.load(tmp_path / "pool", network=HandWritten()).names == tuple(modules)
    other = tmp_path / "sent" / "lyon"
    rewritten(other, lambda state: state.update({"mix.weight": torch.zeros(8, 9)}))
    with pytest.raises(ms.MergestreamError, match=r"differ at 'mix.weight'"):
        replace_expert(tmp_path / "pool", other)
    rewritten(other, lambda state: state.update({"mix.weight": torch.full((8, 8), torch.nan)}))
    with pytest.raises(ms.MergestreamError, match=r"'mix.weight' holds NaN"):
        replace_expert(tmp_path / "pool", other)


# --- confidence ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "words"), [(100.0, "is too confident"), (0.01, "is hardly confident of anything")])
def test_a_scaled_head_is_taken_in_with_warnings(
    pool: Path, tmp_path: Path, pool_command: Callable[..., tuple], scale: float, words: str
) -> None:
    code, out, err = pool_command("add", pool, site(tmp_path / "sent", "graz", 9, pool / "base", scale))
    assert code == 0
    assert "'graz' is in the pool" in out
    assert words in err  # against its own validation loss
    assert "answers noise out of line with the pool" in err
    assert "has a head out of line with the pool" in err
    assert err.count("\n") == err.count("Warning: ") == 3
    assert verify_pool(pool).sound
    assert len([w for w in verify_pool(pool).warnings if "'graz'" in w]) == 3


@pytest.mark.parametrize(("scale", "words"), [(100.0, "is too confident"), (0.01, "is hardly confident")])
def test_without_other_experts_the_card_alone_gives_it_away(tmp_path: Path, scale: float, words: str) -> None:
    (tmp_path / "pool").mkdir()
    (warning,) = add_expert(tmp_path / "pool", site(tmp_path / "sent", "graz", 9, scale=scale)).warnings
    assert words in warning


def test_the_encoder_can_hide_a_scale_from_the_heads_norm_but_not_from_noise(pool: Path, tmp_path: Path) -> None:
    graz = site(tmp_path / "sent", "graz", 9, pool / "base", metrics={})
    rewritten(graz, lambda state: (state["norm.weight"].mul_(100), state["norm.bias"].mul_(100)))
    (warning,) = add_expert(pool, graz).warnings
    assert "answers noise out of line" in warning


@pytest.mark.parametrize("scale", [1.0, 3.0, 1 / 3])
def test_honest_experts_give_no_warning(pool: Path, tmp_path: Path, scale: float) -> None:
    for seed in range(10, 15):
        sent = site(tmp_path / "sent", f"site{seed}", seed, pool / "base", scale)
        assert add_expert(pool, sent).warnings == ()
    assert verify_pool(pool).warnings == []


@pytest.mark.parametrize(
    ("metrics", "temperature", "words"),
    [
        ({"accuracy": 0.9, "nll": 9.0, "ece": 0.1}, 1.0, "far too sure when it is wrong"),
        ({"accuracy": 0.9, "nll": 0.9, "ece": 0.5}, 1.0, "50% off between confidence and accuracy"),
        ({"accuracy": 0.9}, 20.0, "needs the temperature 20"),
        ({"accuracy": 0.9}, 0.05, "needs the temperature 0.05"),
    ],
)
def test_a_card_that_admits_it_is_believed(
    pool: Path, tmp_path: Path, metrics: dict, temperature: float, words: str
) -> None:
    card = {"metrics": {"validation": metrics}, "temperature": temperature}
    (warning,) = add_expert(pool, site(tmp_path / "sent", "graz", 9, pool / "base", **card)).warnings
    assert words in warning


@pytest.mark.parametrize("metrics", [{}, {"validation": None}, {"validation": {"remark": "x", "accuracy": None}}])
def test_metrics_that_say_nothing_are_no_obstacle(pool: Path, tmp_path: Path, metrics: dict) -> None:
    graz = site(tmp_path / "sent", "graz", 9, pool / "base", metrics=metrics, temperature=1.0)
    assert add_expert(pool, graz).warnings == ()


def test_a_perfect_split_asks_for_any_temperature(pool: Path, tmp_path: Path) -> None:
    card = {"metrics": {"validation": {"accuracy": 1.0}}, "temperature": 0.05}
    assert add_expert(pool, site(tmp_path / "sent", "graz", 9, pool / "base", **card)).warnings == ()


def test_probes_are_fixed_and_the_lead_is_the_first_logits() -> None:
    pixels = ms.Preprocessing((8, 8))
    assert torch.equal(probes(pixels), probes(pixels))
    assert mean_lead(torch.tensor([[5.0, 1.0, 3.0], [0.0, 0.0, 6.0]])) == pytest.approx((3 + 6) / 2)
    assert 3 < FACTOR < 100


# --- versions -----------------------------------------------------------------------------------------------


def test_replaced_versions_are_kept_listed_and_restored(
    pool: Path, tmp_path: Path, pool_command: Callable[..., tuple]
) -> None:
    first = (pool / "lyon" / "weights.safetensors").read_bytes()
    for version, seed in ((2, 21), (3, 22)):
        sent = site(tmp_path / "sent", "lyon", seed, pool / "base")
        assert replace_expert(pool, sent).version == version
    third = (pool / "lyon" / "weights.safetensors").read_bytes()
    assert ms.ExpertPool.load(pool).names == ("turin", "lyon", "brest")  # its place is the old one's
    _, out, _ = pool_command("list", pool)
    (line,) = [line for line in out.splitlines() if line.startswith("lyon")]
    assert line.split() == [
        "lyon",
        "lyon",
        "87.0",
        "%",
        "1",
        "3",
        "1,",
        "2",
        read_card(pool / "lyon").weights_sha256[:12],
    ]
    assert restore_expert(pool, "lyon", 1).version == 4
    assert (pool / "lyon" / "weights.safetensors").read_bytes() == first
    versions = tmp_path / "pool.versions" / "lyon"
    assert sorted(path.name for path in versions.iterdir()) == ["1", "2", "3"]
    assert (versions / "3" / "weights.safetensors").read_bytes() == third
    assert (versions / "1" / "weights.safetensors").read_bytes() == first
    assert verify_pool(pool).sound
    # Editing the pool in place must not reach a kept version.
    (pool / "lyon" / "weights.safetensors").write_bytes(b"broken")
    assert (versions / "1" / "weights.safetensors").read_bytes() == first


def test_a_newer_card_of_the_same_weights_is_a_version_the_very_same_is_none(pool: Path, tmp_path: Path) -> None:
    sent = shutil.copytree(pool / "lyon", tmp_path / "sent" / "lyon")
    with pytest.raises(ms.MergestreamError, match="is identical; nothing was replaced"):
        replace_expert(pool, sent)
    assert replace_expert(pool, edited(sent, temperature=1.5)).version == 2
    assert read_card(pool / "lyon").temperature == 1.5


def test_a_version_that_no_longer_fits_is_not_brought_back(pool: Path, tmp_path: Path) -> None:
    replace_expert(pool, site(tmp_path / "sent", "lyon", 21, pool / "base"))
    edited(tmp_path / "pool.versions" / "lyon" / "1", classes=["other", "benign", "malignant"])
    with pytest.raises(ms.MergestreamError, match="silently mean other things"):
        restore_expert(pool, "lyon", 1)
    assert read_card(pool / "lyon").weights_sha256 == read_card(tmp_path / "sent" / "lyon").weights_sha256


def in_a_child(work: Callable[[], object]) -> int:
    """The exit status of a forked process: cheap, and it can be killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.slow
def test_a_kill_at_any_write_leaves_the_old_or_the_new_pool(pool: Path, tmp_path: Path) -> None:
    sent = site(tmp_path / "sent", "lyon", 21, pool / "base")
    old, new = (read_card(folder).weights_sha256 for folder in (pool / "lyon", sent))
    shutil.copytree(pool, tmp_path / "before")
    states = []
    for moment in range(1, 100):
        for path in (pool, tmp_path / "pool.versions"):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "before", pool)
        status = in_a_child(lambda moment=moment: _replace_and_die(pool, sent, moment))
        present = read_card(pool / "lyon").weights_sha256
        loaded = ms.ExpertPool.load(pool)  # whole, whichever it is
        assert loaded.names == ("turin", "lyon", "brest")
        if present == new:  # then the old one is kept
            assert read_card_in(tmp_path / "pool.versions" / "lyon" / "1") == old
        assert present in (old, new)
        states.append((status == signal.SIGKILL, present == new))
        if status == 0:
            break
    assert states[-1] == (False, True)
    assert (True, False) in states
    assert (True, True) in states
    assert len(states) > 10
    # After a kill in the middle the same command works, and keeps the old one once.
    assert verify_pool(pool).sound


def read_card_in(folder: Path) -> str:
    return json.loads((folder / "expert.json").read_text())["weights_sha256"]


def _replace_and_die(pool: Path, sent: Path, moment: int) -> None:
    left = [moment]

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    files.flush = dying(files.flush)
    files._exchange = dying(files._exchange)
    pool_folder._link = dying(pool_folder._link)
    replace_expert(pool, sent)


def test_a_kill_after_keeping_does_not_keep_it_twice(pool: Path, tmp_path: Path) -> None:
    sent = site(tmp_path / "sent", "lyon", 21, pool / "base")
    old = pool_folder.changed_pool

    def work() -> None:
        pool_folder.changed_pool = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        replace_expert(pool, sent)

    assert in_a_child(work) == signal.SIGKILL
    assert pool_folder.changed_pool is old
    assert replace_expert(pool, sent).version == 2
    assert [path.name for path in (tmp_path / "pool.versions" / "lyon").iterdir()] == ["1"]


def test_two_that_add_at_once_are_both_in_the_pool(pool: Path, tmp_path: Path) -> None:
    sent = [site(tmp_path / "sent", f"site{n}", n, pool / "base") for n in (31, 32, 33, 34)]
    children = []
    for folder in sent:
        child = os.fork()
        if child == 0:
            try:
                add_expert(pool, folder)
            finally:
                os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert set(ms.ExpertPool.load(pool).names) == {"turin", "lyon", "brest", *(folder.name for folder in sent)}


# --- verify -------------------------------------------------------------------------------------------------


def test_verify_lists_everything_wrong_at_once(pool: Path, tmp_path: Path, pool_command: Callable[..., tuple]) -> None:
    add_expert(pool, site(tmp_path / "sent", "graz", 9, pool / "base"))
    replace_expert(pool, site(tmp_path / "sent", "graz", 10, pool / "base"))
    code, verdict, _ = pool_command("verify", pool)
    assert (code, verdict.startswith("Sound: 4 experts. Signatures were not checked")) == (0, True)
    (pool / "lyon" / "weights.safetensors").write_bytes(b"x" * 64)
    rewritten(pool / "brest", scaled_tensor(float("inf")))
    edited(pool / "graz", base_sha256="1" * 64)
    write_statistics(pool / "turin", Statistics({"gram/x": torch.ones(1)}, {"gram": 1}), read_card(pool / "lyon"))
    (pool / "half").mkdir()
    (pool / "pool.json").write_text(json.dumps({"schema_version": 1, "order": ["turin", "lyon", "lyon", "oslo"]}))
    (tmp_path / "pool.versions" / "graz" / "1" / "weights.safetensors").write_bytes(b"y")
    code, out, _ = pool_command("verify", pool)
    assert code == 1
    for sentence in (
        "lyon/weights.safetensors does not match the sha-256",
        "Expert 'brest': 'head.bias' holds NaN or Inf",
        "'graz' was not trained from this pool's base",
        "turin/statistics.safetensors was measured with other weights",
        "half holds no expert.json",
        "lists 'lyon' more than once",
        "lists the expert 'oslo', but its folder is not there",
        "Version 1 of 'graz':",
    ):
        assert out.count(f"{sentence}") == 1, sentence
    assert out.count("Wrong: ") == 8
    assert "\nNOT sound: 8 problem(s)." in out
    code, out, _ = pool_command("verify", pool, "--json")
    assert code == 1
    value = json.loads(out)
    assert (value["sound"], len(value["problems"])) == (False, 8)


def test_verify_sees_the_base_cards_and_candidates(pool: Path, tmp_path: Path) -> None:
    runs = candidates_folder(pool)
    site(runs, "lyon-0", 40, domain="lyon")
    site(runs, "oslo-0", 41, domain="oslo")
    (problem,) = verify_pool(pool).problems
    assert problem.startswith("Candidates: 'oslo-0' is of domain 'oslo'")
    shutil.rmtree(runs / "oslo-0")
    rewritten(pool / "base", lambda state: state["head.bias"].add_(1))
    assert [p.split(":")[0] for p in verify_pool(pool).problems] == [
        f"'{name}' was not trained from this pool's base" for name in ("turin", "lyon", "brest")
    ]
    (pool / "base" / "weights.safetensors").write_bytes(b"x" * 64)
    assert any("base/weights.safetensors does not match" in p for p in verify_pool(pool).problems)
    (pool / "lyon" / "expert.json").write_text("{")
    assert any("lyon/expert.json is not readable JSON" in p for p in verify_pool(pool).problems)


# --- import -------------------------------------------------------------------------------------------------


def imported(out: Path) -> Tensor:
    """What the imported expert answers, as a pool of its own reads it."""
    return ms.ExpertPool.load(out.parent).logits(torch.zeros(2, 3, 16, 16) + 0.3)[0]


@torch.no_grad()
def answer(module: nn.Module) -> Tensor:
    from mergestream.networks.architecture import logits_of

    return logits_of(module.eval()(torch.zeros(2, 3, 16, 16) + 0.3))


WRAPPED = {
    "plain": lambda state: state,
    "state_dict": lambda state: {"epoch": 3, "arch": "vit", "state_dict": state},
    "model": lambda state: {"model": state, "optimizer": {"param_groups": []}},
    "data parallel": lambda state: {"model_state_dict": {f"module.{k}": v for k, v in state.items()}},
    "lightning": lambda state: {
        "pytorch-lightning_version": "2.5",
        "hyper_parameters": {"lr": 0.1},
        "state_dict": {f"model.{k}": v for k, v in state.items()},
    },
    "compiled in parallel": lambda state: {f"module._orig_mod.{k}": v for k, v in state.items()},
    "nested": lambda state: {"state_dict": {"model": state}},
}


@pytest.mark.parametrize("how", list(WRAPPED))
def test_timm_checkpoints_in_usual_wrappers(tmp_path: Path, pool_command: Callable[..., tuple], how: str) -> None:
    module, out = network(3), tmp_path / "pool" / "lyon"
    torch.save(WRAPPED[how](module.state_dict()), tmp_path / "x.pth")
    code, output, err = pool_command(
        "import", tmp_path / "x.pth", out, *TIMM, "--classes", "benign, malignant,other", "--domain", "Lyon"
    )
    assert (code, err) == (0, "")
    assert "Expert 'lyon'" in output
    card = read_card(out)
    assert (card.classes, card.domain, card.head) == (CLASSES, "Lyon", ("head",))
    assert card.architecture.arguments == {**ARGUMENTS, "num_classes": 3}
    assert card.recipe["imported"]["sha256"] == files.sha256_of_file(tmp_path / "x.pth")
    assert str(tmp_path) not in json.dumps(card.to_json())
    assert torch.equal(imported(out), answer(module))


def test_torchvision_with_its_head_and_other_pixels(tmp_path: Path, pool_command: Callable[..., tuple]) -> None:
    torch.manual_seed(0)
    module = torchvision.models.squeezenet1_1(num_classes=2)
    torch.save(module.state_dict(), tmp_path / "x.pt")
    code, _, err = pool_command(
        "import", tmp_path / "x.pt", tmp_path / "pool" / "a", "--network", "torchvision:squeezenet1_1",
        "--classes", "no,yes", "--head", "classifier.1", "--size", 64, "--mean", "0,0,0", "--std", "1,1,1",
        "--interpolation", "bicubic",
    )  # fmt: skip
    assert (code, err) == (0, "")
    card = read_card(tmp_path / "pool" / "a")
    assert card.preprocessing == ms.Preprocessing((64, 64), "bicubic", (0.0,) * 3, (1.0,) * 3)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        expected = module.eval()(images)
    assert torch.equal(ms.ExpertPool.load(tmp_path / "pool").logits(images)[0], expected)


def hugging_face(labels: tuple[str, ...]) -> nn.Module:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ViTConfig(**small, image_size=16, patch_size=8)
    config.id2label, config.label2id = dict(enumerate(labels)), {label: i for i, label in enumerate(labels)}
    return ViTForImageClassification(config)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_hugging_face_folders(tmp_path: Path, pool_command: Callable[..., tuple], kind: str) -> None:
    module = hugging_face(CLASSES)
    module.save_pretrained(tmp_path / "hub")
    if kind == "bin":
        (tmp_path / "hub" / "model.safetensors").unlink()
        torch.save(module.state_dict(), tmp_path / "hub" / "pytorch_model.bin")
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 3, "do_normalize": True}
    (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps(processor))
    common = (
        tmp_path / "hub",
        tmp_path / "pool" / "a",
        "--network",
        "transformers:ViTForImageClassification",
        "--classes",
    )
    code, _, err = pool_command("import", *common, "other,benign,malignant")
    assert code == 2
    assert "has the classes in another order: benign, malignant, other" in err
    code, _, err = pool_command("import", *common, ",".join(CLASSES))
    assert (code, err) == (0, "")
    assert torch.equal(imported(tmp_path / "pool" / "a"), answer(module))
    card = read_card(tmp_path / "pool" / "a")
    assert card.preprocessing == ms.Preprocessing((16, 16), "bicubic", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    ms.ExpertPool.from_modules({"b": module}, preprocessing=card.preprocessing).save(tmp_path / "python")
    # A site that works in Python and one that imports have the same card.
    assert read_card(tmp_path / "python" / "b").architecture == card.architecture


def test_hugging_face_files_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, pool_command: Callable[..., tuple]
) -> None:
    hugging_face(CLASSES).save_pretrained(tmp_path / "hub")
    whole = load_file(tmp_path / "hub" / "model.safetensors")
    for state, sentence in (
        ({k: v for k, v in whole.items() if k != "classifier.bias"}, "lacks 1 tensor(s): classifier.bias."),
        ({**whole, "pooler.weight": torch.ones(2)}, "has unexpected 1 tensor(s): pooler.weight."),
        ({**whole, "classifier.bias": torch.ones(4)}, "does not fit the network: shapes differ"),
    ):
        save_file(state, tmp_path / "hub" / "model.safetensors")
        code, out, err = pool_command(
            "import", tmp_path / "hub", tmp_path / "a", "--network", "transformers:ViTForImageClassification",
            "--classes", ",".join(CLASSES),
        )  # fmt: skip
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert sentence in err


def test_timm_folders_from_the_hub(tmp_path: Path, pool_command: Callable[..., tuple]) -> None:
    (tmp_path / "hub").mkdir()
    module = network(4)
    save_file(module.state_dict(), tmp_path / "hub" / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "model_args": ARGUMENTS, "num_classes": 3}
    config["pretrained_cfg"] = {"mean": [0.4] * 3, "std": [0.3] * 3, "interpolation": "bilinear"}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    common = (tmp_path / "hub", tmp_path / "pool" / "a", "--classes", ",".join(CLASSES), "--network")
    code, _, err = pool_command("import", *common, "resnet18")
    assert code == 2
    assert "says they are of 'vit_tiny_patch16_224', not 'resnet18'" in err
    assert pool_command("import", *common, "vit_tiny_patch16_224")[0] == 0
    assert read_card(tmp_path / "pool" / "a").preprocessing == ms.Preprocessing(
        (16, 16), "bilinear", (0.4,) * 3, (0.3,) * 3
    )
    assert torch.equal(imported(tmp_path / "pool" / "a"), answer(module))


def test_monai_networks(tmp_path: Path, pool_command: Callable[..., tuple]) -> None:
    from monai.networks.nets import DenseNet

    arguments = {"spatial_dims": 2, "in_channels": 3, "init_features": 8, "growth_rate": 4, "block_config": [2, 2]}
    module = DenseNet(out_channels=3, **arguments).eval()
    torch.save({"network": module.state_dict()}, tmp_path / "x.pt")
    options = [f"--arg={key}={value}" for key, value in arguments.items()]
    rest = ("--network", "monai:DenseNet", *options, "--classes", ",".join(CLASSES))
    code, output, err = pool_command("import", tmp_path / "x.pt", tmp_path / "pool" / "a", *rest)
    assert (code, err) == (0, "")
    assert "give --size to set it" in output
    card = read_card(tmp_path / "pool" / "a")
    assert card.head == ("class_layers.out",)
    assert card.architecture == Architecture("monai", "DenseNet", {**arguments, "num_classes": 3})
    assert torch.equal(imported(tmp_path / "pool" / "a"), answer(module))
    assert pool_command("import", tmp_path / "x.pt", tmp_path / "sized" / "a", *rest, "--size", "16")[0] == 0
    assert ms.ExpertPool.load(tmp_path / "sized").preprocessing == ms.Preprocessing((16, 16))
    code, _, err = pool_command(
        "import", tmp_path / "x.pt", tmp_path / "b", "--network", "monai:DenseNett", "--classes", "a,b"
    )
    assert code == 2
    assert "Did you mean 'DenseNet'?" in err


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (os.system, (f"touch {self.marker}",))


@pytest.mark.parametrize("how", ["torch", "pickle", "wrapped"])
def test_a_malicious_pickle_is_refused_and_does_not_run(
    tmp_path: Path, pool_command: Callable[..., tuple], how: str
) -> None:
    file, marker = tmp_path / "x.pth", tmp_path / "owned"
    evil = Malicious(marker)
    if how == "pickle":
        file.write_bytes(pickle.dumps(evil))
    else:
        torch.save({"state_dict": network(1).state_dict(), "callbacks": evil} if how == "wrapped" else evil, file)
    code, out, err = pool_command("import", file, tmp_path / "a", *TIMM, "--classes", ",".join(CLASSES))
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "cannot be read without running code in it" in err
    assert "weights_only" not in err  # torch's advice how to run it all the same
    assert not marker.exists()
    assert not (tmp_path / "a").exists()
    pickle.loads(pickle.dumps(evil))
    assert marker.exists()  # it would have run


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, pool_command: Callable[..., tuple]) -> None:
    state = network(1).state_dict()

    def attempt(content: object, *options: object, classes: str = ",".join(CLASSES)) -> str:
        torch.save(content, tmp_path / "x.pth")
        code, out, err = pool_command(
            "import", tmp_path / "x.pth", tmp_path / "a", *TIMM, "--classes", classes, *options
        )
        assert (code in (1, 2), out) == (True, "")
        assert err.count("\n") == 1
        assert not (tmp_path / "a").exists()
        return err

    assert "lacks 1 tensor(s): head.bias." in attempt({k: v for k, v in state.items() if k != "head.bias"})
    loss = {**{f"model.{k}": v for k, v in state.items()}, "criterion.weight": torch.ones(3)}
    assert "has unexpected 1 tensor(s): criterion.weight." in attempt({"state_dict": loss})
    assert "--ignore criterion" in attempt({"state_dict": loss})
    assert "no tensor in" in attempt({"state_dict": loss}, "--ignore", "kriterion")
    assert "'head.weight' has shape (3, 16), the network needs (2, 16)" in attempt(state, classes="a,b")
    assert "must be a list of different names" in attempt(state, classes="a,b,a")
    assert "holds no state dict: it is Tensor" in attempt(torch.zeros(3))
    assert "epoch are not tensors" in attempt({**state, "epoch": 3})
    assert "'head.bias' holds NaN" in attempt({**state, "head.bias": torch.full((3,), torch.nan)})
    assert "There is no module" in attempt(state, "--head", "haed")
    assert "--arg is NAME=VALUE" in attempt(state, "--arg", "img_size")
    assert "weights come from safetensors only" in attempt(state, "--arg", "checkpoint_path=x.pth")
    assert "cannot be read without running" in attempt(network(1))
    torch.save({"state_dict": loss}, tmp_path / "x.pth")
    code, _, err = pool_command(
        "import", tmp_path / "x.pth", tmp_path / "a", *TIMM, "--classes", ",".join(CLASSES), "--ignore", "criterion."
    )
    assert (code, err) == (0, "")


def test_import_and_merge_never_write_over_anything(
    pool: Path, tmp_path: Path, pool_command: Callable[..., tuple]
) -> None:
    torch.save(network(1).state_dict(), tmp_path / "x.pth")
    before = (pool / "lyon" / "expert.json").read_bytes()
    for out, sentence in ((pool / "lyon", "is not overwritten"), (tmp_path / "base", "cannot be called 'base'")):
        for arguments in (
            ("import", tmp_path / "x.pth", out, *TIMM, "--classes", ",".join(CLASSES)),
            ("merge", pool, out, "--method", "mean"),
        ):
            code, _, err = pool_command(*arguments)
            assert code == 1
            assert sentence in err
    assert (pool / "lyon" / "expert.json").read_bytes() == before
    assert not (tmp_path / "base").exists()


def test_half_precision_is_kept(tmp_path: Path, pool_command: Callable[..., tuple]) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        state = {name: tensor.to(dtype) for name, tensor in network(1).state_dict().items()}
        name = str(dtype).removeprefix("torch.")
        torch.save(state, tmp_path / "x.pth")
        pool_command("import", tmp_path / "x.pth", tmp_path / name, *TIMM, "--classes", ",".join(CLASSES))
        written = load_file(tmp_path / name / "weights.safetensors")
        assert {tensor.dtype for tensor in written.values()} == {dtype}
        assert all(torch.equal(written[key], state[key]) for key in state)


# --- merge --------------------------------------------------------------------------------------------------


def test_merge_by_coefficients_is_the_weighted_sum(
    pool: Path, tmp_path: Path, pool_command: Callable[..., tuple]
) -> None:
    code, out, _ = pool_command(
        "merge", pool, tmp_path / "m" / "both", "--encoder", "0.5,0.3,0.2", "--head", "1,0,0", "--json"
    )
    assert code == 0
    states = [load_file(pool / name / "weights.safetensors") for name in ("turin", "lyon", "brest")]
    written = load_file(tmp_path / "m" / "both" / "weights.safetensors")
    assert set(written) == set(states[0])
    for name, tensor in written.items():
        shares = (1, 0, 0) if name.startswith("head.") else (0.5, 0.3, 0.2)
        torch.testing.assert_close(tensor, sum(a * s[name] for a, s in zip(shares, states, strict=True)))
    card = read_card(tmp_path / "m" / "both")
    assert json.loads(out) == json.loads(json.dumps(card.to_json()))
    assert card.domain == "turin+lyon+brest"
    assert card.class_counts["benign"] == 15
    assert card.base_sha256 == read_card(pool / "base").weights_sha256
    assert card.recipe["merged_from"][1] == {
        "name": "lyon", "weights_sha256": read_card(pool / "lyon").weights_sha256, "encoder": 0.3, "head": 0,
    }  # fmt: skip
    images = make_images()
    merged = ms.ExpertPool.load(tmp_path / "m")
    expected = ms.ExpertPool.load(pool)
    weights = expected.merge([0.5, 0.3, 0.2], [1.0, 0.0, 0.0])
    assert torch.equal(merged.logits(images)[0], expected.forward(weights, images))


@pytest.mark.parametrize(
    ("losses", "shared"), [(("weighted",) * 3, "weighted"), (("weighted", "plain", "plain"), None)]
)
def test_a_merged_card_tells_the_loss_that_all_share(
    pool: Path, tmp_path: Path, pool_command: Callable[..., tuple], losses: tuple[str, ...], shared: str | None
) -> None:
    """Or rules that take a loss's weights off would leave them on, or take off what was never there."""
    for name, loss in zip(("turin", "lyon", "brest"), losses, strict=True):
        card = json.loads((pool / name / "expert.json").read_text())
        (pool / name / "expert.json").write_text(json.dumps({**card, "recipe": {"loss": loss}}))
    assert pool_command("merge", pool, tmp_path / "merged", "--method", "mean")[0] == 0
    assert read_card(tmp_path / "merged").recipe.get("loss") == shared


def test_merge_by_method_and_what_cannot_be_merged(
    pool: Path, tmp_path: Path, pool_command: Callable[..., tuple]
) -> None:
    assert pool_command("merge", pool, tmp_path / "m" / "mean", "--method", "task_arithmetic")[0] == 0
    images = make_images()
    expected = ms.create_method("task_arithmetic", ms.ExpertPool.load(pool))(images)
    assert torch.equal(ms.ExpertPool.load(tmp_path / "m").logits(images)[0], expected)
    assert read_card(tmp_path / "m" / "mean").recipe["method"] == "task_arithmetic"
    assert pool_command("merge", pool, tmp_path / "two", "--encoder", "0.5,0,0.5")[0] == 0
    assert read_card(tmp_path / "two").domain == "turin+brest"
    for options, sentence in (
        ((), "Choose how to merge"),
        (("--head", "1,0,0"), "Choose how to merge"),
        (("--encoder", "1,0,0", "--method", "mean"), "Choose how to merge"),
        (("--encoder", "0.5,0.5"), "in this order: turin, lyon, brest"),
        (("--encoder", "0.9,0.9,0.9"), "sum to 1"),
        (("--encoder", "a,b,c"), "--encoder is numbers with commas between"),
        (("--method", "entropy_adaptive"), "does not make one model for all batches"),
        (("--method", "adamerging"), "does not make one model for all batches"),
        (("--method", "ensemble"), "does not make one model for all batches"),
        (("--method", "meen"), "Did you mean 'mean'?"),
    ):
        code, _, err = pool_command("merge", pool, tmp_path / "no", *options)
        assert code == 2
        assert sentence in err
    assert not (tmp_path / "no").exists()


def test_a_merged_model_can_be_sent_to_another_pool(pool: Path, tmp_path: Path) -> None:
    from mergestream.methods.merged_expert import merge_pool

    merge_pool(pool, tmp_path / "all", method="mean")
    assert add_expert(pool, tmp_path / "all").expert == "all"
    assert ms.ExpertPool.load(pool).names[-1] == "all"


# --- codes of the classes ---------------------------------------------------------------------------------------------


def test_codes_of_classes_are_written_into_a_card_and_a_contradiction_is_a_warning(tmp_path: Path) -> None:
    root = tmp_path / "pool"
    for number, name in enumerate(("graz", "lyon")):
        site(root, name, number)
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"benign: {{value: 300{number}, scheme: SCT, meaning: Benign}}\n")
        set_concepts(root / name, file)
    assert read_card(root / "lyon").class_concepts == {
        "benign": {"value": "3001", "scheme": "SCT", "meaning": "Benign"}
    }
    assert any("different codes for the class 'benign'" in each for each in verify_pool(root).warnings)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("benign", "not a list of codes"),
        ("{", "cannot be read: .*It lists a class with its code"),
        ("#" * (1 << 20) + "\n", "it has more than 1,048,576 bytes"),
        ("cyst: {value: 1, scheme: SCT, meaning: x}", "not one of its classes"),
        ("benign: {value: 1, scheme: SCT}", "a code per class: value, scheme and meaning"),
        ("benign: {value: '1 2', scheme: SCT, meaning: x}", "a code per class"),
    ],
)
def test_wrong_codes_are_refused_with_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    folder = site(tmp_path, "graz", 0)
    (tmp_path / "codes.yaml").write_text(text)
    with pytest.raises(InputError, match=sentence):
        set_concepts(folder, tmp_path / "codes.yaml")
