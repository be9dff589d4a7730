"""Cards, configuration files and statistics of strangers read no file, contact no server, run no code, never crash."""

import json
import pickle
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import ViTConfig, ViTForImageClassification

import mergestream as ms
from benching import command
from mergestream.bench.engine.pool_at_target import load_pool
from mergestream.networks.architecture import Architecture, create_network
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.exchange.pool_inspection import verify_pool
from mergestream.pool.expert_card import ExpertCard

SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
NETWORK = create_network("vit_tiny_patch16_224", num_classes=2, **SMALL)
VALIDATION = {
    "accuracy": 0.9,
    "nll": 0.3,
    "ece": 0.05,
    "mean_probability": {"no": 0.6, "yes": 0.4},
    "risk_by_confidence": [[0.5, 1.0, 0.1], [0.9, 0.5, 0.02]],
}


def write_pool(root: Path, network: dict[str, Any] | None = None) -> Path:
    """Two sound experts; with `network`, both cards ask for another one."""
    for name in ("a", "b"):
        card = ExpertCard.for_network(
            name,
            NETWORK,
            ("no", "yes"),
            domain=f"site {name}",
            class_counts={"no": 3, "yes": 2},
            metrics={"validation": VALIDATION},
            recipe={"loss": "weighted", "steps": 5},
        )
        write_expert(root / name, NETWORK.module.state_dict(), card)
        if network is not None:
            path = root / name / "expert.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "network": network}))
    return root


def refusal(work: Callable[[], object]) -> str | None:
    """The sentence of an error about the input, on one printable line; None if the work succeeds. Others are raised."""
    try:
        work()
    except ms.MergestreamError as error:
        sentence = str(error)
    else:
        return None
    assert sentence.isprintable()
    return sentence


class Bomb:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.marker,))


@pytest.fixture
def trespasses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Everything that tried to reach a server or to load a pickle. The test fails if there is any."""
    attempts: list[str] = []

    def refuse(what: str) -> Callable[..., Any]:
        def call(*arguments: Any, **_: Any) -> Any:
            attempts.append(f"{what}: {arguments[-1:]}")
            raise OSError(f"{what} is not available in this test")

        return call

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse(f"socket.{name}"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse("getaddrinfo"))
    monkeypatch.setattr(torch, "load", refuse("torch.load"))
    monkeypatch.setattr(pickle, "load", refuse("pickle.load"))
    yield attempts
    assert attempts == []


def attacks(bomb: str) -> dict[str, dict[str, Any]]:
    wrapper, vit = "TimmWrapperForImageClassification", "ViTForImageClassification"

    def asks(library: str, name: str, **arguments: Any) -> dict[str, Any]:
        return {"library": library, "name": name, "arguments": arguments}

    return {
        "checkpoint in a wrapper": asks("transformers", wrapper, model_args={"checkpoint_path": bomb}),
        "hub in a wrapper": asks("transformers", wrapper, architecture="hf-hub:org/model"),
        "pretrained in a wrapper": asks("transformers", wrapper, model_args={"pretrained": True}),
        "any class": asks("transformers", "AutoModelForImageClassification"),
        "language model": asks("transformers", "ShieldGemma2ForImageClassification"),
        "kernel of a hub": asks("transformers", vit, attn_implementation="org/kernel"),
        "hidden kernel": asks("transformers", vit, _attn_implementation="org/kernel"),
        "private kernel": asks("transformers", vit, _attn_implementation_internal="org/kernel"),
        "nested kernel": asks("transformers", vit, vision_config={"attn_implementation": "org/kernel"}),
        "quantization": asks("transformers", vit, quantization_config={"quant_method": "gptq"}),
        "remote code": asks("transformers", vit, auto_map={"AutoConfig": "org/repo--module.Class"}),
        "backbone": asks("transformers", vit, backbone="resnet18", use_pretrained_backbone=True),
        "hub": asks("timm", "hf-hub:org/model"),
        "hub with an underscore": asks("timm", "hf_hub:org/model"),
        "local folder": asks("timm", f"local-dir:{Path(bomb).parent}"),
        "hub behind a name": asks("timm", "resnet18.hf-hub:org/model"),
        "path behind a name": asks("timm", f"resnet18.{bomb}"),
        "checkpoint": asks("timm", "resnet18", checkpoint_path=bomb),
        "configuration": asks("timm", "resnet18", pretrained_cfg={"file": bomb}, pretrained=True),
        "nested checkpoint": asks("timm", "resnet18", block_args={"inner": [{"checkpoint_path": bomb}]}),
        "file as a layer": asks("timm", "resnet18", norm_layer=bomb),
        "backbone weights": asks("torchvision", "resnet18", weights_backbone="DEFAULT"),
        "segmentation": asks("torchvision", "fcn_resnet50", weights_backbone="DEFAULT"),
        "MONAI's downloads": asks("monai", "resnet18", spatial_dims=2, n_input_channels=3, pretrained=True),
        "MONAI's loader": asks("monai", "TorchVisionFCModel", model_name="resnet18"),
        "another library": asks("os", "system", command="true"),
    }  # fmt: skip


@pytest.mark.parametrize("attack", attacks("x.pth"))
def test_a_card_reads_no_file_contacts_no_server_and_runs_no_code(
    tmp_path: Path, trespasses: list[str], attack: str
) -> None:
    bomb, marker = tmp_path / "bomb.pth", tmp_path / "owned"
    bomb.write_bytes(pickle.dumps(Bomb(marker)))
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18"}))
    pool = write_pool(tmp_path / "pool", attacks(str(bomb))[attack])
    with pytest.raises(ms.MergestreamError) as refused:
        ms.ExpertPool.load(pool)
    assert "\n" not in str(refused.value)
    result = verify_pool(pool)
    assert not result.sound
    shown = command("pool", "verify", str(pool))
    assert (shown.returncode, shown.stderr) == (1, "")
    assert "NOT sound" in shown.stdout
    assert not marker.exists()
    assert trespasses == []


CONFIGURATIONS = {
    "transformers:TimmWrapperForImageClassification": [
        {"architecture": "resnet18", "model_args": {"checkpoint_path": "BOMB"}},
        {"architecture": "hf-hub:org/model"},
    ],
    "transformers:ViTForImageClassification": [
        {"attn_implementation": "org/kernel"},
        {"quantization_config": {"quant_method": "gptq"}},
        {"hidden_size": 100_000, "num_hidden_layers": 100_000},
        {"hidden_act": "BOMB"},
        {"hidden_size": "x" * 10_000},
        {"backbone_config": {"checkpoint": "BOMB"}},
    ],
    "resnet18": [
        {"model_args": {"checkpoint_path": "BOMB"}},
        {"model_args": {"num_classes": 7, "block_args": {"checkpoint_path": "BOMB"}}},
        {"architecture": "hf-hub:org/model"},
        {"model_args": {"layers": [100_000] * 4}},
    ],
    "hf-hub:org/model": [{}],
    "timm:hf-hub:org/model": [{}],
}


@pytest.mark.parametrize(
    ("network", "config"), [(network, config) for network, configs in CONFIGURATIONS.items() for config in configs]
)
def test_an_import_reads_no_other_file_and_contacts_no_server(
    tmp_path: Path, trespasses: list[str], network: str, config: dict
) -> None:
    bomb, marker = tmp_path / "bomb.pth", tmp_path / "owned"
    bomb.write_bytes(pickle.dumps(Bomb(marker)))
    save_file({"head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config).replace("BOMB", str(bomb)))
    shown = command("pool", "import", str(tmp_path), str(tmp_path / "a"), "--network", network, "--classes", "no,yes")
    assert (shown.returncode in (1, 2), shown.stdout, shown.stderr.count("\n")) == (True, "", 1), shown.stderr
    assert not marker.exists()
    assert not (tmp_path / "a").exists()
    assert trespasses == []


@pytest.mark.parametrize(
    "network",
    [
        {"library": "timm", "name": "vit_tiny_patch16_224", "arguments": {"embed_dim": 100_000, "depth": 1000}},
        {"library": "timm", "name": "vit_tiny_patch16_224", "arguments": {"depth": 100_000, "embed_dim": 192}},
        {"library": "timm", "name": "vit_tiny_patch16_224", "arguments": {"depth": 10**12}},
        {"library": "timm", "name": "vit_7b_patch16_dinov3", "arguments": {}},
        {"library": "timm", "name": "swin_tiny_patch4_window7_224", "arguments": {"window_size": 4096}},
        {"library": "torchvision", "name": "regnet_y_128gf", "arguments": {"num_classes": 100_000}},
        {
            "library": "transformers",
            "name": "ViTForImageClassification",
            "arguments": {"hidden_size": 100_000, "num_hidden_layers": 100_000, "num_attention_heads": 1},
        },
    ],
    ids=lambda network: f"{network['name']}, {network['arguments']}",
)
def test_a_network_far_larger_than_its_weights_is_refused_before_its_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: dict
) -> None:
    pool, largest = write_pool(tmp_path / "pool", network), 0
    real = torch.empty

    def counted(*sizes: Any, **options: Any) -> torch.Tensor:
        nonlocal largest
        tensor = real(*sizes, **options)
        largest = max(largest, 0 if tensor.is_meta else tensor.numel())
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    with pytest.raises(ms.MergestreamError, match=r"far larger|not a number up to"):
        ms.ExpertPool.load(pool)
    assert largest < 1 << 24


def test_networks_of_users_stay_possible(tmp_path: Path) -> None:
    """A configuration that no card may hold makes the network custom: it is loaded with an instance."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ViTConfig(**small, image_size=16, patch_size=8, num_labels=2, remark="/some/path")
    module = ViTForImageClassification(config)
    pool = ms.ExpertPool.from_modules({"a": module}, classes=("no", "yes"))
    assert pool.template.architecture.library == "custom"
    pool.save(tmp_path / "pool")
    with pytest.raises(ms.MergestreamError, match="Pass an instance"):
        ms.ExpertPool.load(tmp_path / "pool")
    assert ms.ExpertPool.load(tmp_path / "pool", network=module).fingerprint() == pool.fingerprint()


KEYS = (
    "img_size", "act_layer", "block_args", "checkpoint_path", "pretrained", "pretrained_cfg", "_private", "cache_dir",
    "weights", "norm_layer", "depth", "hub_id", "x\n", "", "class",
)  # fmt: skip
TEXTS = st.sampled_from(
    ["gelu", "avg", "", "/etc/passwd", "hf-hub:a/b", "http://x", "org/kernel", "..", "a\ud800", "GELU"]
)
LEAVES = st.none() | st.booleans() | st.sampled_from([0, 1, 2, -1, 16, 100_000, 10**30, 1e300, float("nan")]) | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_arguments_are_plain_or_refused(arguments: dict[str, Any]) -> None:
    asked = lambda: Architecture("timm", "vit_tiny_patch16_224", {**arguments, "num_classes": 2})  # noqa: E731
    if refusal(asked) is None:
        text = json.dumps(arguments, allow_nan=False)
        assert not any(sign in text for sign in ("/", "..", "hub", "pretrained", "checkpoint", "cache", "_private"))
        refusal(lambda: asked().build(most=1000))


# --- every field, every wrong value --------------------------------------------------------------------------

DEEP: list[Any] = []
for _ in range(40):
    DEEP = [DEEP]
HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**400, float("nan"), float("inf"), -float("inf"), 1e300, "", "text", "../escaped", "a/b",
    "\ud800", "\x1b[31mred", "two\nlines", "x" * 100_000, [], [None], ["a", "a"], [[[]]], {}, {"a": {"b": []}},
    {"\ud800": 1}, DEEP,
)  # fmt: skip


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every field, inside objects and lists too."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(card: dict[str, Any], path: tuple[str | int, ...], value: Any) -> str:
    copy = json.loads(json.dumps(card))
    inside = copy
    for part in path[:-1]:
        inside = inside[part]
    inside[path[-1]] = value
    return json.dumps(copy)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_no_field_of_a_card_can_cause_anything_but_a_sentence(tmp_path: Path, every: int) -> None:
    pool = write_pool(tmp_path / "pool")
    path = pool / "a" / "expert.json"
    card = json.loads(path.read_text())
    assert len(list(places(card))) > 50

    def use() -> None:
        ExpertCard.read(pool / "a")
        loaded = ms.ExpertPool.load(pool)
        assert verify_pool(pool).cards
        ms.create_method("merge_and_fit", loaded, temperature="card")(torch.zeros(2, 3, 16, 16))

    cases = [(place, value) for place in places(card) for value in HOSTILE][::every]
    refusals = 0
    for place, value in cases:
        path.write_text(changed(card, place, value))
        refusals += refusal(use) is not None
    assert len(cases) > refusals > len(cases) // 2


@pytest.mark.parametrize(
    "value",
    [None, 7, "text", [], {}, {"schema_version": 1}, *({"schema_version": 1, "order": order} for order in HOSTILE)],
    ids=lambda value: repr(value)[:40],
)
def test_no_order_can_cause_anything_but_a_sentence(tmp_path: Path, value: Any) -> None:
    pool = write_pool(tmp_path / "pool")
    (pool / "pool.json").write_text(json.dumps(value))
    if refusal(lambda: ms.ExpertPool.load(pool)) is None:
        assert value["order"] in ([], ["a", "a"])
    else:
        assert not verify_pool(pool).sound


BROKEN = {
    "risk": ({"metrics": {"validation": {"risk_by_confidence": [["high", "low", "?"]]}}}, "risk_by_confidence"),
    "number": ({"temperature": float("nan")}, "not finite"),
    "surrogate": ({"domain": "\ud800"}, "control characters"),
    "escape": ({"classes": ["\x1b[2J", "yes"]}, "control characters"),
    "nesting": ({"recipe": {"steps": DEEP}}, "nested deeper"),
    "type": ({"class_counts": [1]}, "whole numbers by class"),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("verb", ["pool verify", "pool list", "bench", "serve"])
def test_every_command_refuses_a_broken_card_in_one_line(tmp_path: Path, verb: str, what: str) -> None:
    pool = write_pool(tmp_path / "pool")
    changes, words = BROKEN[what]
    path = pool / "a" / "expert.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    options = {
        "bench": ("--dataset", "phantom", "--pool", str(pool), "--methods", "mean", "--out", str(tmp_path / "out")),
        "serve": (str(pool), "--method", "mean", "--state", str(tmp_path / "state"), "--port", "0"),
    }.get(verb, (str(pool),))
    shown = command(*verb.split(), *options)
    assert shown.returncode == 1
    assert words in shown.stdout + shown.stderr
    assert "Traceback" not in shown.stdout + shown.stderr
    lines = shown.stderr.splitlines()[-1:] if verb == "serve" else shown.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ([] if verb == "pool verify" else ["mergestream"])


# --- one class, damaged files --------------------------------------------------------------------------------


def test_a_pool_of_one_class_is_refused_with_the_reason(tmp_path: Path) -> None:
    network = create_network("vit_tiny_patch16_224", num_classes=1, **SMALL)
    card = ExpertCard.for_network("a", network, ("only",))
    write_expert(tmp_path / "pool" / "a", network.module.state_dict(), card)
    with pytest.raises(ms.MergestreamError, match="has one class only, 'only'"):
        load_pool(str(tmp_path / "pool"), "cpu")
    shown = command("serve", str(tmp_path / "pool"), "--state", str(tmp_path / "state"), "--port", "0")
    assert shown.returncode == 1
    assert "has one class only, 'only'" in shown.stderr


@pytest.mark.parametrize("head", [["head", "nowhere"], ["nowhere", "head"], ["head", "head.nowhere"], ["pos_drop"]])
def test_a_head_that_the_network_does_not_have_is_refused(tmp_path: Path, head: list[str]) -> None:
    pool = write_pool(tmp_path / "pool")
    for name in ("a", "b"):
        path = pool / name / "expert.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "head": head}))
    assert refusal(lambda: ms.ExpertPool.load(pool))
    assert not verify_pool(pool).sound


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda pool: (pool / "a" / "weights.safetensors").write_bytes(b"\x08" + bytes(40)), "truncated, damaged"),
        (lambda pool: (pool / "a" / "weights.safetensors").unlink(), "weights.safetensors is missing"),
        (lambda pool: (pool / "a" / "expert.json").unlink(), "but no expert.json"),
        (lambda pool: (pool / "base").mkdir(), r"base/expert.json is missing"),
        (lambda pool: (pool / "a" / "expert.json").write_text("{"), "not readable JSON"),
        (lambda pool: (pool / "a" / "expert.json").write_text(" " * (17 << 20)), "larger than 16 MiB"),
    ],
    ids=["truncated weights", "no weights", "no card", "no base", "torn card", "huge card"],
)
def test_a_damaged_pool_says_what_is_wrong(tmp_path: Path, damage: Callable[[Path], object], sentence: str) -> None:
    pool = write_pool(tmp_path / "pool")
    damage(pool)
    with pytest.raises(ms.MergestreamError, match=sentence):
        ms.ExpertPool.load(pool)
    assert not verify_pool(pool).sound


def measured(pool: Path) -> Path:
    images = {name: torch.randn(4, 3, 16, 16) for name in ("a", "b")}
    ms.measure_statistics(ms.ExpertPool.load(pool), images, ("gram", "fisher_exact")).save(pool)
    return pool / "a" / "statistics.safetensors"


@pytest.mark.parametrize("method", ["regmean", "fisher"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "metadata", "shapes", "names", "nan"])
def test_damaged_statistics_are_refused_with_a_sentence(tmp_path: Path, method: str, damage: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = measured(write_pool(tmp_path / "pool"))
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "metadata":
        save_file(tensors, path, metadata={"mergestream": "[" * 100_000})
    elif damage == "shapes":
        save_file({key: torch.zeros(3) for key in tensors}, path, metadata=metadata)
    elif damage == "names":
        save_file({f"{key.split('/')[0]}/nowhere": value for key, value in tensors.items()}, path, metadata=metadata)
    else:
        save_file({key: torch.full_like(value, torch.nan) for key, value in tensors.items()}, path, metadata=metadata)
    with pytest.raises(ms.MergestreamError) as refused:
        ms.create_method(method, ms.ExpertPool.load(tmp_path / "pool"))(torch.zeros(2, 3, 16, 16))
    assert re.search("statistics|[Mm]easure|information", str(refused.value))
    assert "\n" not in str(refused.value)
