"""Cards, names, folders and runs from elsewhere: refused by name, never obeyed, and nothing of the user's is lost."""

import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import mergestream as ms
from conftest import CLASSES, HandWritten, make_experts, make_images, make_pool, micro_vit
from mergestream.networks.architecture import Architecture, create_network, find_head, from_module
from mergestream.networks.preprocessing import find_preprocessing
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.expert_card import ExpertCard, read_card
from mergestream.training import Recipe, train_base, train_expert

NETWORK = create_network(
    "vit_tiny_patch16_224", num_classes=2, img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        card = ExpertCard.for_network(name, NETWORK, ("no", "yes"))
        write_expert(tmp_path / "pool" / name, NETWORK.module.state_dict(), card)
    return tmp_path / "pool"


def edited(folder: Path, **changes: object) -> None:
    path = folder / "a" / "expert.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", ["../escaped", "/abs", "a/b", ".hidden", ".", "", " a", "x" * 101, "a\n", None, 3, []])
def test_names_are_plain_path_components(folder: Path, name: object) -> None:
    edited(folder, name=name)
    with pytest.raises(ms.MergestreamError):
        ms.ExpertPool.load(folder)
    with pytest.raises((ms.MergestreamError, TypeError)):
        ms.ExpertPool.from_modules({name: HandWritten()})


def test_a_card_belongs_to_its_folder(folder: Path) -> None:
    edited(folder, name="b")
    with pytest.raises(ms.MergestreamError, match="is the card of 'b', but its folder is 'a'"):
        ms.ExpertPool.load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"temperature": -1},
        {"temperature": "hot"},
        {"class_counts": [1, 2]},
        {"class_counts": {"no": -1}},
        {"classes": "no"},
        {"classes": ["x", "x"]},
        {"classes": ["x", "y", "z"]},
        {"classes": []},
        {"head": "head"},
        {"head": []},
        {"network": {"library": "timm", "name": 5, "arguments": {}}},
        {"network": {"library": ["timm"], "name": "x", "arguments": {}}},
        {"network": {"library": "timm", "name": "vit_tiny_patch16_224", "arguments": [1]}},
        {"network": "vit"},
        {"preprocessing": {"size": ["a", "b"], "interpolation": "bilinear", "mean": [0], "std": [1]}},
        {"preprocessing": {"size": [-16, 16], "interpolation": "bilinear", "mean": [0], "std": [1]}},
        {"preprocessing": {"size": [10**9, 16], "interpolation": "bilinear", "mean": [0], "std": [1]}},
        {"preprocessing": {"size": [16, 16], "interpolation": "bilinear", "mean": ["a"], "std": [1]}},
        {"preprocessing": 7},
        {"recipe": 7},
        {"domain": 7},
    ],
    ids=str,
)
def test_malformed_cards_are_refused(folder: Path, changes: dict) -> None:
    edited(folder, **changes)
    with pytest.raises(ms.MergestreamError):
        ms.ExpertPool.load(folder)


def test_deeply_nested_json_is_refused(folder: Path) -> None:
    (folder / "a" / "expert.json").write_text("[" * 200_000)
    with pytest.raises(ms.MergestreamError, match="not readable JSON"):
        ms.ExpertPool.load(folder)


@pytest.mark.parametrize(
    "arguments",
    [
        {"checkpoint_path": "x.pth"},
        {"pretrained": True},
        {"pretrained_cfg": {}},
        {"weights": "DEFAULT"},
        {"cache_dir": "x"},
    ],
    ids=str,
)
def test_a_card_cannot_make_a_network_read_files_or_ask_a_server(folder: Path, arguments: dict) -> None:
    edited(folder, network={"library": "timm", "name": "vit_tiny_patch16_224", "arguments": arguments})
    with pytest.raises(ms.MergestreamError, match="weights come from safetensors only"):
        ms.ExpertPool.load(folder)
    with pytest.raises(ms.MergestreamError, match="There is no torchvision network"):
        Architecture("torchvision", "fcn_resnet50").build()


def test_a_folder_with_weights_and_no_card_is_not_silently_absent(folder: Path) -> None:
    (folder / "a" / "expert.json").unlink()
    with pytest.raises(ms.MergestreamError, match=r"holds weights.safetensors but no expert.json"):
        ms.ExpertPool.load(folder)


def test_integer_buffers_of_another_shape_or_type_are_refused() -> None:
    state = HandWritten().state_dict()
    for wrong in (torch.zeros(7, dtype=torch.int64), torch.zeros(())):
        with pytest.raises(ms.MergestreamError, match="num_batches_tracked"):
            ms.ExpertPool.from_state_dicts({"a": {**state, "norm.num_batches_tracked": wrong}}, HandWritten())
    with pytest.raises(ms.MergestreamError, match=r"'fc.bias' is torch.int64"):
        ms.ExpertPool.from_state_dicts({"a": {**state, "fc.bias": torch.zeros(5, dtype=torch.int64)}}, HandWritten())


def test_types_that_cannot_hold_the_weights_are_refused(folder: Path) -> None:
    pool = make_pool("vit")
    with pytest.raises(ms.MergestreamError, match="not a floating type"):
        pool.to(dtype=torch.int32)
    pool.bank[0, 0] = 1e6
    with pytest.raises(ms.MergestreamError, match=r"too large for torch.float16"):
        pool.to(dtype=torch.float16)
    state = {key: value.clone() for key, value in NETWORK.module.state_dict().items()}
    state["head.bias"][0] = 1e6
    write_expert(folder / "a", state, ExpertCard.for_network("a", NETWORK, ("no", "yes")))
    with pytest.raises(ms.MergestreamError, match=r"holds NaN or Inf in torch.float16"):
        ms.ExpertPool.load(folder, dtype=torch.float16)


# --- nothing of the user's is lost --------------------------------------------------------------------------


def test_folders_that_are_not_ours_are_never_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "results"
    mine.mkdir()
    (mine / "thesis.txt").write_text("three years")
    data = ms.DomainData("t", "x", CLASSES, make_images(5), torch.arange(5))
    run = ms.evaluate(ms.create_method("mean", make_pool("vit")), data, ms.streams.iid(data.labels))
    for save in (lambda: run.save(mine), lambda: make_pool("vit").save(mine)):
        with pytest.raises(ms.MergestreamError, match="holds other files"):
            save()
    assert (mine / "thesis.txt").read_text() == "three years"
    make_pool("vit").save(tmp_path / "pool")
    (tmp_path / "pool" / "notes.txt").write_text("mine")
    (tmp_path / "pool" / "lyon" / "notes.txt").write_text("mine")
    with pytest.raises(ms.MergestreamError, match="holds other files"):
        make_pool("vit").save(tmp_path / "pool")
    with pytest.raises(ms.MergestreamError, match="holds other files"):
        write_expert(tmp_path / "pool" / "lyon", {}, make_pool("vit").cards[0])
    (tmp_path / "link").symlink_to(mine)
    with pytest.raises(ms.MergestreamError, match="not a plain folder"):
        run.save(tmp_path / "link")


def test_saving_a_pool_again_replaces_it_whole(tmp_path: Path) -> None:
    make_pool("vit", base=True).save(tmp_path / "pool")
    make_pool("vit").without("brest").save(tmp_path / "pool")
    again = ms.ExpertPool.load(tmp_path / "pool", network=micro_vit())
    assert again.names == ("lyon", "turin")
    assert again.base is None
    assert [path.name for path in tmp_path.iterdir()] == ["pool"]


KILLED = """
import os, sys, signal
from pathlib import Path
import mergestream.runtime.files as files
real = files.flush
def flush(path):
    real(path)
    if path == Path(sys.argv[1]).parent and Path(sys.argv[1]).exists():
        os.kill(os.getpid(), signal.SIGKILL)  # right after the swap, before any tidying up
files.flush = flush
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.expert_card import read_card
import torch
card = read_card(Path(sys.argv[1]))
write_expert(Path(sys.argv[1]), {"other": torch.zeros(3)}, card)
"""


def test_a_kill_around_the_swap_leaves_a_whole_folder(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder / "a")], check=False)
    assert done.returncode == -signal.SIGKILL
    card = read_card(folder / "a")  # the new one, whole
    assert (folder / "a" / "weights.safetensors").is_file()
    assert card.name == "a"


def test_files_respect_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_expert(tmp_path / "a", {"x": torch.zeros(1)}, ExpertCard.for_network("a", NETWORK, ("no", "yes")))
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "expert.json").stat().st_mode & 0o077 == 0
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    module = make_experts(HandWritten, ("a",))["a"]
    network = from_module(module)
    write_expert(tmp_path / "pool" / "a", module.state_dict(), ExpertCard.for_network("a", network, CLASSES))
    pool = ms.ExpertPool.load(tmp_path / "pool", network=HandWritten())
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(pool.logits(images)[0], module(images))


@pytest.mark.parametrize("damage", ["steps.jsonl", "predictions.npz"])
def test_a_damaged_run_says_so(tmp_path: Path, damage: str) -> None:
    data = ms.DomainData("t", "x", CLASSES, make_images(5), torch.arange(5))
    run = ms.evaluate(ms.create_method("mean", make_pool("vit")), data, ms.streams.iid(data.labels))
    folder = run.save(tmp_path / "run")
    assert torch.equal(ms.Run.load(folder).predictions, run.predictions)
    (folder / damage).write_bytes(b"PK\x03\x04 no")
    with pytest.raises(ms.MergestreamError, match="damaged"):
        ms.Run.load(folder)
    (folder / damage).unlink()
    with pytest.raises(ms.MergestreamError, match="damaged"):
        ms.Run.load(folder)


# --- silent wrong answers -----------------------------------------------------------------------------------


def test_evaluate_refuses_another_class_list() -> None:
    method = ms.create_method("mean", make_pool("vit"))
    for classes in (tuple(reversed(CLASSES)), (*CLASSES, "more")):
        data = ms.DomainData("t", "x", classes, make_images(5), torch.arange(5))
        with pytest.raises(ms.MergestreamError, match="are not those of the pool"):
            ms.evaluate(method, data, [[0, 1], [2, 3, 4]])


def test_evaluate_takes_plain_lists() -> None:
    data = ms.DomainData("t", "x", CLASSES, make_images(5), torch.arange(5))
    assert len(ms.evaluate(ms.create_method("mean", make_pool("vit")), data, [[0, 1], [4, 3, 2]]).steps) == 2


def hugging_face(labels: list[str], dropout: float = 0.0) -> nn.Module:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ViTConfig(**small, image_size=16, patch_size=8, hidden_dropout_prob=dropout)
    config.id2label, config.label2id = dict(enumerate(labels)), {label: i for i, label in enumerate(labels)}
    return ViTForImageClassification(config)


def test_hugging_face_class_names_are_read_and_compared(tmp_path: Path) -> None:
    one, two = hugging_face(["benign", "malignant"]), hugging_face(["benign", "malignant"], dropout=0.1)
    for name, module in (("lyon", one), ("brest", two)):
        module.save_pretrained(tmp_path / name)
    loaded = {name: ViTForImageClassification.from_pretrained(tmp_path / name) for name in ("lyon", "brest")}
    assert ms.ExpertPool.from_modules(loaded).classes == ("benign", "malignant")
    with pytest.raises(ms.MergestreamError, match=r"names its classes|built differently"):
        ms.ExpertPool.from_modules({"a": one, "b": hugging_face(["malignant", "benign"])})


class Strided(nn.Module):
    def __init__(self, stride: int = 1, act=torch.relu) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3, stride=stride)})
        self.stage = nn.Module()
        self.stage.act = act
        self.fc = nn.Linear(4, 2)
        self.epoch = stride

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.stage.act(self.body["conv"](images)).mean((2, 3)))


def test_strides_and_activations_are_compared_bookkeeping_is_not() -> None:
    with pytest.raises(ms.MergestreamError, match=r"stride is \(1, 1\) against \(2, 2\)"):
        ms.ExpertPool.from_modules({"a": Strided(1), "b": Strided(2)})
    with pytest.raises(ms.MergestreamError, match=r"act is '.*relu' against '.*tanh'"):
        ms.ExpertPool.from_modules({"a": Strided(), "b": Strided(act=torch.tanh)})
    with pytest.raises(ms.MergestreamError, match="'base' is built differently"):
        ms.ExpertPool.from_modules({"a": Strided(1)}, base=Strided(2))
    later = Strided()
    later.epoch, later.site = 9, "brest"
    assert len(ms.ExpertPool.from_modules({"a": Strided(), "b": later})) == 2


def test_a_hidden_layer_with_a_usual_name_is_not_taken_for_the_head() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.classifier = nn.Linear(8, 5), nn.Linear(5, 5)

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.output = nn.Sequential(nn.Conv2d(3, 8, 1)), nn.Linear(8, 2)

    for module in (Hidden(), Stem()):
        with pytest.raises(ms.MergestreamError, match="head="):
            find_head(module)


def test_preprocessing_is_not_guessed_where_published_weights_disagree() -> None:
    from torchvision import models

    assert from_module(models.efficientnet_b3(num_classes=2)).preprocessing is None
    assert from_module(models.resnet18(num_classes=2)).preprocessing == ms.Preprocessing((224, 224))
    import timm

    folded = timm.create_model("tresnet_m", num_classes=2)
    assert len(find_preprocessing(folded, "timm", "tresnet_m").mean) == 3


def test_names_take_head_and_preprocessing() -> None:
    states = {"a": create_network("resnet18", num_classes=2).module.state_dict()}
    given, parts = ms.Preprocessing((64, 64), mean=(0.0,) * 3, std=(1.0,) * 3), ("layer4", "fc")
    pool = ms.ExpertPool.from_state_dicts(states, "resnet18", classes=("n", "y"), head=parts, preprocessing=given)
    assert pool.preprocessing == given
    assert pool.template.head == parts
    with pytest.raises(ms.MergestreamError, match="There is no module"):
        ms.ExpertPool.from_state_dicts(states, "resnet18", classes=("n", "y"), head="nonsense")


def test_the_fingerprint_covers_temperatures_counts_and_integers() -> None:
    pool = make_pool("hand_written")
    seen = {pool.fingerprint()}
    for change in ({"temperature": 2.0}, {"class_counts": {"round": 3}}):
        other = make_pool("hand_written")
        other.cards = (replace(other.cards[0], **change), *other.cards[1:])
        seen.add(other.fingerprint())
    other = make_pool("hand_written")
    other.integers[0]["norm.num_batches_tracked"] += 1
    seen.add(other.fingerprint())
    assert len(seen) == 4


def test_a_base_of_other_classes_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    data = ms.load_dataset("phantom", images=20)["lyon"]
    recipe = Recipe(steps=2, batch_size=4, validate_every=2)
    small = {"img_size": (32, 32), "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2}
    steps: list[int] = []

    def base(classes: tuple[str, ...]) -> ExpertCard:
        return train_base(
            tmp_path / "base", "vit_tiny_patch16_224", small, data, classes, recipe, lambda: steps.append(1)
        )

    assert base(("a", "b")).classes == base(("a", "b")).classes == ("a", "b")
    assert len(steps) == 2
    assert base(("x", "y", "z")).classes == ("x", "y", "z")
    with pytest.raises(ms.MergestreamError, match="The base is for"):
        train_expert(tmp_path / "lyon", tmp_path / "base", data, recipe)


@pytest.mark.parametrize("from_disk", [False, True])
def test_a_pool_in_another_type_does_not_keep_the_old_bank_alive(tmp_path: Path, from_disk: bool) -> None:
    pool = make_pool("vit", base=True)
    if from_disk:
        pool.save(tmp_path / "pool")
        pool = ms.ExpertPool.load(tmp_path / "pool", network=micro_vit())
    old = weakref.ref(pool.bank)
    half = pool.to(dtype=torch.bfloat16)
    del pool
    gc.collect()
    assert old() is None
    assert half.base.dtype == torch.bfloat16


def test_shared_buffers_that_are_not_saved_follow_the_pool() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.ones(3)
            self.one, self.two, self.fc = nn.Module(), nn.Module(), nn.Linear(3, 2)
            for part in (self.one, self.two):
                part.register_buffer("table", table, persistent=False)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.fc(images.mean((2, 3)) * self.one.table * self.two.table)

    pool = ms.ExpertPool.from_modules({"a": Shared()}).to(dtype=torch.bfloat16)
    assert pool.logits(torch.randn(2, 3, 4, 4)).shape == (1, 2, 2)


def test_networks_that_reshape_with_view_take_any_memory_layout() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3 * 8 * 8, 2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.fc(images.view(len(images), -1))

    pool = ms.ExpertPool.from_modules({"a": Viewing()}, preprocessing=ms.Preprocessing((8, 8)))
    channels_last = make_images(2, 8).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    method = ms.create_method("entropy_adaptive", pool, views=("transpose",))
    assert torch.equal(method(channels_last), method(channels_last.contiguous()))


def test_unusual_doors_give_sentences() -> None:
    pool = make_pool("vit")
    with pytest.raises(ms.MergestreamError, match="Did you mean 'hflip'"):
        pool.logits(make_images(), view="hflipp")
    method = ms.create_method("mean", pool)
    with pytest.raises(ms.MergestreamError, match="'state' is missing"):
        method.load_state_dict({key: value for key, value in method.state_dict().items() if key != "state"})
    wrong_size = ms.ExpertPool.from_modules({"a": micro_vit()}, preprocessing=ms.Preprocessing((20, 20)))
    with pytest.raises(ms.MergestreamError, match="cannot take a batch"):
        wrong_size.logits(make_images())
    bare = ms.ExpertPool.from_modules({"a": HandWritten()})
    with pytest.raises(ms.MergestreamError, match="cannot take a batch"):
        ms.create_method("mean", bare, recalibrate_bn=True)(torch.randn(2, 1, 8, 8))
    for bad in (
        {"batch_size": 0, "alpha": 0.1},
        {"alpha": 1e-310},
        {"alpha": 0.1, "seed": -1},
        {"alpha": 1, "seed": None},
    ):
        with pytest.raises(ms.MergestreamError):
            ms.streams.dirichlet([0, 1, 0], **bad)
    for bad in (224, (0, 0), ("a", "b"), (16.5, 16)):
        with pytest.raises(ms.MergestreamError, match="whole pixels"):
            ms.Preprocessing(size=bad)


def test_several_targets_make_one_mixture() -> None:
    dataset = ms.load_dataset("phantom", images=40)
    data, domains = ms.concatenate([dataset["lyon"], dataset["graz"]])
    stream = ms.streams.create_stream("mixture:abrupt", data.labels, domains=domains)
    assert data.name == "lyon+graz"
    assert sum(map(len, stream)) == len(data) == 80
    with pytest.raises(ms.MergestreamError, match="one class list"):
        ms.concatenate([dataset["lyon"], replace(dataset["graz"], classes=("a", "b", "c", "d"))])
