"""Cards for people, folders in Hugging Face's form, and a base without training."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import mergestream as ms
from benching import NETWORK, command
from mergestream.data.datasets.standins.drawing import CLASSES
from mergestream.pool.expert_card import ExpertCard, read_card
from mergestream.pool.model_card import model_card
from mergestream.training.training_run import _require_same_base
from signing import make_key, signed_pool

METRICS = {"validation": {"accuracy": 0.75, "balanced_accuracy": 0.5, "nll": 0.9}}


@pytest.fixture(scope="module")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cards")
    signed_pool(folder / "pool", make_key(folder / "keys", "lyon"))
    return folder


def test_every_expert_has_a_card_that_hugging_face_reads(tmp_path: Path) -> None:
    made = base(tmp_path / "pool")
    text = (tmp_path / "pool" / "base" / "README.md").read_text()
    assert made["classes"] == list(CLASSES)
    assert ModelCard(text).data.library_name == "timm"
    card = replace(
        read_card(tmp_path / "pool" / "base"),
        name="lyon",
        domain="lyon",
        metrics=METRICS,
        class_counts={"benign": 40, "malignant": 3, "normal": 0},
        about={"contact": "ai@lyon.example", "licence": "cc-by-nc-4.0"},
    )
    data, text = ModelCard(model_card(card)).data, model_card(card)
    assert data.license == "cc-by-nc-4.0"
    assert {result.metric_type: result.metric_value for result in data.eval_results} == METRICS["validation"]
    assert {result.dataset_name for result in data.eval_results} == {"lyon, held out"}
    for line in ("| benign | 40 |", "| malignant | fewer than 5 |", "no image of normal", "Contact: ai@lyon.example"):
        assert line in text
    assert "Not a medical device." in text


def test_texts_in_a_card_can_neither_act_as_html_nor_break_the_header(tmp_path: Path) -> None:
    base(tmp_path / "pool")
    odd = {"contact": "<script>alert(1)</script> | x", "licence": "--- evil: yes"}
    text = model_card(replace(read_card(tmp_path / "pool" / "base"), about=odd))
    assert "<script" not in text
    assert ModelCard(text).data.license == odd["licence"]


def base(pool: Path, *more: str) -> dict[str, object]:
    arguments = [word for name, value in NETWORK.items() for word in ("--arg", f"{name}={value}")]
    network = ("--network", "vit_tiny_patch16_224", "--classes", ",".join(CLASSES), "--init", "random")
    done = command("pool", "init", str(pool), *network, *arguments, *more, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_base_without_training_is_that_of_train(tmp_path: Path) -> None:
    base(tmp_path / "pool")
    recipe = {"network": "vit_tiny_patch16_224", "arguments": NETWORK, "init": "random", "classes": list(CLASSES)}
    recipe |= {"head_init": "shared", "seed": 0}
    _require_same_base(read_card(tmp_path / "pool" / "base"), recipe, single_site=False)
    again = command("pool", "init", str(tmp_path / "pool"), "--network", "resnet18", "--classes", "a,b")
    assert again.returncode == 1
    assert "not overwritten" in again.stderr
    for wrong, sentence in ((("a",), "two classes or more"), (("a,a",), "all different")):
        refused = command("pool", "init", str(tmp_path / "new"), "--network", "resnet18", "--classes", *wrong)
        assert refused.returncode != 0
        assert sentence in refused.stderr
    assert not (tmp_path / "new").exists()


def test_an_expert_goes_to_the_hub_and_comes_back_bit_by_bit_with_its_signature(
    consortium: Path, tmp_path: Path
) -> None:
    expert, hub, back = consortium / "pool" / "lyon", tmp_path / "hub", tmp_path / "lyon"
    done = command("pool", "export", str(expert), "--hf", str(hub))
    assert done.returncode == 0, done.stderr
    assert {"README.md", "model.safetensors", "config.json", "expert.json"} <= {path.name for path in hub.iterdir()}
    done = command("pool", "import", str(hub), str(back), "--hf")
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in back.iterdir()} == {
        path.name: path.read_bytes() for path in expert.iterdir()
    }
    pool = Path(shutil.copytree(consortium / "pool", tmp_path / "pool"))
    assert command("pool", "remove", str(pool), "lyon").returncode == 0
    trusted = str(consortium / "keys" / "trusted")
    added = command("pool", "add", str(pool), str(back), "--require-signed-by", trusted)
    assert added.returncode == 0, added.stderr


def test_timm_loads_the_exported_folder(consortium: Path, tmp_path: Path) -> None:
    assert command("pool", "export", str(consortium / "pool" / "lyon"), "--hf", str(tmp_path / "hub")).returncode == 0
    loaded = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    weights = load_file(tmp_path / "hub" / "model.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.state_dict().items())
    pool = ms.ExpertPool.load(consortium / "pool")
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    inputs = pool.template.require_preprocessing()(images)
    assert torch.allclose(loaded(inputs), pool.logits(images)[pool.index("lyon")], atol=1e-5)


def test_wrong_folders_are_refused_with_a_sentence(consortium: Path, tmp_path: Path) -> None:
    expert = consortium / "pool" / "lyon"
    assert command("pool", "export", str(expert), "--hf", str(tmp_path / "hub")).returncode == 0
    other = command("pool", "import", str(tmp_path / "hub"), str(tmp_path / "turin"), "--hf")
    assert other.returncode == 1
    assert "of the expert 'lyon'" in other.stderr
    file = tmp_path / "hub" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    damaged = command("pool", "import", str(tmp_path / "hub"), str(tmp_path / "lyon"), "--hf")
    assert damaged.returncode == 1
    assert "does not match" in damaged.stderr
    assert not (tmp_path / "lyon").exists()
    plain = command("pool", "import", str(expert), str(tmp_path / "lyon"), "--hf")
    assert "was not written by 'mergestream pool export'" in plain.stderr
    assert command("pool", "import", str(expert), str(tmp_path / "lyon")).returncode == 2


def test_a_changed_card_loses_its_signature(consortium: Path, tmp_path: Path) -> None:
    expert = Path(shutil.copytree(consortium / "pool" / "lyon", tmp_path / "lyon"))
    done = command("pool", "card", str(expert), "--contact", "ai@lyon.example", "--limits", "Not for children.")
    assert done.returncode == 0, done.stderr
    assert ExpertCard.read(expert).about == {"contact": "ai@lyon.example", "limits": "Not for children."}
    assert "Not for children." in (expert / "README.md").read_text()
    assert not (expert / "model.sig").exists()
