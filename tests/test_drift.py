"""Drift of weights: closed forms, naive references that hold all experts, memory, the command line."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import mergestream as ms
from benching import command
from conftest import CLASSES, FACTORIES, HandWritten, make_base, make_experts, make_pool
from mergestream.bench.drift.drift_figures import figures_of, pair_heat_maps, static_figure
from mergestream.bench.drift.drift_report import describe_drift, render_drift, run_drift
from mergestream.bench.drift.layers import component_of, layers_of, places_by_name, places_of
from mergestream.bench.drift.pool_drift import BY_NAME, Drift, analyse_drift
from mergestream.bench.drift.spread import Spread, implied_loss, moments_of, pairs_of, spread_of, total
from mergestream.bench.report.figures import FORMATS
from mergestream.networks.architecture import create_network
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.errors import CheckpointError, InputError, PoolError, UnknownNameError
from mergestream.runtime.parallel import quiet

FIGURE_NAMES = (
    "drift_by_depth", "weights_and_biases", "norm_ratios", "signal_loss", "component_heat_map", "drift_from_base",
    "angles_from_base",
)  # fmt: skip
SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "schemas" / "drift.schema.json").read_text())


def spread(*vectors: list[float], base: list[float] | None = None) -> Spread:
    return spread_of(moments_of(torch.tensor(vectors), None if base is None else torch.tensor(base)))


# --- closed forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "angle", "ratio", "lost"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0, 1, 0),
        ([1.0, 0.0], [0.0, 1.0], 90, 1, 100 * (1 - math.sqrt(0.5))),
        ([1.0, 2.0], [-1.0, -2.0], 180, 1, 100),
        ([1.0, 2.0], [3.0, 6.0], 0, 3, 0),
        ([1.0, 0.0], [-2.0, 0.0], 180, 2, 100 * (1 - 0.5 / 1.5)),
        ([1.0, 0.0], [1.0, 1.0], 45, math.sqrt(2), None),
    ],
    ids=["equal", "orthogonal", "antiparallel", "scaled", "scaled and opposed", "45 degrees"],
)
def test_two_vectors(one: list[float], other: list[float], angle: float, ratio: float, lost: float | None) -> None:
    result = spread(one, other)
    assert result.mean_angle == pytest.approx(angle, abs=1e-5)
    assert result.angles == (result.mean_angle,)
    assert result.norm_ratios == pytest.approx((ratio,))
    assert result.implied_loss == pytest.approx(100 * (1 - math.cos(math.radians(angle) / 2)), abs=1e-6)
    if lost is not None:
        assert result.measured_loss == pytest.approx(lost, abs=1e-6)


@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_orthogonal_heads_of_equal_norm_lose_all_but_a_root_of_their_number(count: int) -> None:
    result = spread(*(5 * torch.eye(count)).tolist())
    assert result.angles == pytest.approx((90,) * (count * (count - 1) // 2))
    assert result.measured_loss == pytest.approx(100 * (1 - 1 / math.sqrt(count)))
    assert result.implied_loss == pytest.approx(100 * (1 - math.sqrt(0.5)))


def test_the_implied_loss_reaches_half_at_120_degrees_only() -> None:
    assert implied_loss(120) == pytest.approx(50)
    assert implied_loss(90) == pytest.approx(29.289, abs=1e-3)


@pytest.mark.parametrize("degrees", [1e-4, 1e-2, 3.0, 90.0, 179.99])
def test_angles_are_exact_where_an_arc_cosine_is_not(degrees: float) -> None:
    turned = math.radians(degrees)
    vectors = torch.tensor([[1.0, 0.0], [math.cos(turned), math.sin(turned)]], dtype=torch.float64)
    assert spread_of(moments_of(vectors)).mean_angle == pytest.approx(degrees, rel=1e-6)


def test_zero_vectors_have_no_angle_and_are_left_out_of_means() -> None:
    result = spread([0.0, 0.0], [1.0, 0.0], [0.0, 1.0])
    assert result.angles == (None, None, pytest.approx(90))
    assert result.mean_angle == pytest.approx(90)
    assert result.norm_ratios == (None, None, pytest.approx(1))
    assert result.measured_loss == pytest.approx(100 * (1 - math.sqrt(2) / 2))
    nothing = spread([0.0, 0.0], [0.0, 0.0])
    assert (nothing.mean_angle, nothing.implied_loss, nothing.measured_loss) == (None, None, None)


def test_one_expert_has_no_pair_and_loses_nothing() -> None:
    result = spread([3.0, 4.0], base=[3.0, 0.0])
    assert (result.angles, result.mean_angle, result.measured_loss) == ((), None, 0)
    assert result.from_base is not None
    assert result.from_base.relative_norms == pytest.approx((4 / 3,))


def test_drift_from_a_base() -> None:
    result = spread([2.0, 0.0], [1.0, 3.0], base=[1.0, 0.0]).from_base
    assert result is not None
    assert (result.base_norm, result.norms) == (1, (1, 3))
    assert result.mean_angle == pytest.approx(90)
    zero = spread([2.0, 0.0], [1.0, 3.0], base=[0.0, 0.0]).from_base
    assert zero is not None
    assert zero.relative_norms == (None, None)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 30), st.integers(1, 29))
def test_slices_add_up_and_match_numpy(seed: int, count: int, size: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(count, size, generator=generator, dtype=torch.float64)
    base = torch.randn(size, generator=generator, dtype=torch.float64)
    cut = min(cut, size)
    pieces = [moments_of(vectors[:, span], base[span]) for span in (slice(cut), slice(cut, None))]
    result, whole = spread_of(total(pieces)), naive(vectors.numpy(), base.numpy())
    assert result.angles == pytest.approx(whole["angles"], abs=1e-5)
    assert result.measured_loss == pytest.approx(whole["measured_loss"], abs=1e-6)
    assert result.from_base is not None
    assert result.from_base.angles == pytest.approx(whole["base_angles"], abs=1e-5)


def naive(vectors: np.ndarray, base: np.ndarray) -> dict[str, object]:
    def angles(each: np.ndarray) -> list[float]:
        unit = each / np.linalg.norm(each, axis=1, keepdims=True)
        return [math.degrees(math.acos(np.clip(unit[i] @ unit[j], -1, 1))) for i, j in pairs_of(len(each))]

    norms = np.linalg.norm(vectors, axis=1)
    lost = 100 * (1 - np.linalg.norm(vectors.mean(axis=0)) / norms.mean())
    return {"norms": norms, "angles": angles(vectors), "measured_loss": lost, "base_angles": angles(vectors - base)}


# --- against a reference that holds every expert --------------------------------------------------------------

# Layers by hand: the names that a reader of the network would give, and how their tensors start.
EXPECTED = {
    "vit": {
        "stem": ("cls_token", "pos_embed", "patch_embed."), "blocks.0": ("blocks.0.",), "blocks.1": ("blocks.1.",),
        "norm": ("norm.",), "head": ("head.",),
    },
    "resnet": {
        "stem": ("conv1.", "bn1."), "layer1.0": ("layer1.0.",), "layer2.0": ("layer2.0.",),
        "layer3.0": ("layer3.0.",), "layer4.0": ("layer4.0.",), "head": ("fc.",),
    },
    "hand_written": {"stem": ("stem.",), "norm": ("norm.",), "mix": ("mix.",), "head": ("fc.",)},
}  # fmt: skip


@pytest.mark.parametrize("kind", list(FACTORIES))
def test_a_pool_on_disk_matches_experts_in_memory(kind: str, tmp_path: Path) -> None:
    make_pool(kind, base=True).save(tmp_path / "pool")
    experts, base = make_experts(FACTORIES[kind]), make_base(FACTORIES[kind])
    drift = analyse_drift(tmp_path / "pool", network=HandWritten() if kind == "hand_written" else None)
    assert [layer.name for layer in drift.layers] == list(EXPECTED[kind])
    assert drift.experts == tuple(experts)
    for layer, starts in zip(drift.layers, EXPECTED[kind].values(), strict=True):
        for spread_found, bias in ((layer.whole, None), (layer.weights, False), (layer.biases, True)):
            vectors = [flat(module, starts, bias) for module in (*experts.values(), base)]
            if not len(vectors[0]):
                assert spread_found is None
                continue
            reference = naive(np.stack(vectors[:-1]), vectors[-1])
            assert spread_found is not None
            assert spread_found.numbers == len(vectors[0])
            assert spread_found.norms == pytest.approx(reference["norms"])
            assert spread_found.angles == pytest.approx(reference["angles"], abs=1e-5)
            assert spread_found.measured_loss == pytest.approx(reference["measured_loss"], abs=1e-6)
            if kind != "hand_written":  # its tied layer was moved twice by the noise, as in the pool
                assert spread_found.from_base is not None
                assert spread_found.from_base.angles == pytest.approx(reference["base_angles"], abs=1e-5)


def flat(module: nn.Module, starts: tuple[str, ...], bias: bool | None) -> np.ndarray:
    """Parameters only (tied ones once) of one layer, as one vector."""
    chosen = [
        tensor.detach().double().flatten()
        for name, tensor in module.named_parameters()
        if name.startswith(starts) and bias in (None, name.endswith("bias"))
    ]
    return torch.cat([*chosen, torch.zeros(0)]).numpy()


def test_components_of_a_layer_hold_all_its_numbers_and_buffers_none(tmp_path: Path) -> None:
    pool = make_pool("resnet")
    pool.save(tmp_path / "pool")
    drift = analyse_drift(tmp_path / "pool")
    parameters = sum(tensor.numel() for tensor in FACTORIES["resnet"]().parameters())
    assert sum(layer.whole.numbers for layer in drift.layers) == parameters
    for layer in drift.layers:
        assert sum(part.numbers for part in layer.components.values()) == layer.whole.numbers
    assert drift.components == ["convolution", "downsampling", "norms", "head"]
    assert not drift.has_base
    assert all(layer.whole.from_base is None for layer in drift.layers)
    assert any("Buffers" in note for note in drift.notes)


def test_half_precision_is_summed_in_double(tmp_path: Path) -> None:
    pool = make_pool("vit").to("cpu", dtype=torch.bfloat16)
    pool.save(tmp_path / "pool")
    drift = analyse_drift(tmp_path / "pool")
    files = [load_file(tmp_path / "pool" / name / "weights.safetensors")["head.weight"] for name in pool.names]
    reference = naive(np.stack([file.double().flatten().numpy() for file in files]), np.zeros(files[0].numel()))
    head = drift.layers[-1].weights
    assert head is not None
    assert head.angles == pytest.approx(reference["angles"], abs=1e-5)


def test_slices_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pool("resnet", base=True).save(tmp_path / "pool")
    whole = analyse_drift(tmp_path / "pool")
    monkeypatch.setattr("mergestream.bench.drift.pool_drift.SLICE", 50)
    cut = analyse_drift(tmp_path / "pool")
    for one, other in zip(whole.layers, cut.layers, strict=True):
        assert one.whole.angles == pytest.approx(other.whole.angles, rel=1e-9)


# --- layers and components of the libraries' networks ---------------------------------------------------------

HF = "transformers:"
NETWORKS: dict[str, tuple[dict[str, object], list[str], list[str], set[str]]] = {
    "vit_tiny_patch16_224": (
        {"depth": 2}, ["stem", "blocks.0", "blocks.1", "norm", "head"], ["stem", "0", "1", "norm", "head"],
        {"patch embedding", "position embedding", "tokens", "attention qkv", "attention proj", "MLP", "norms", "head"},
    ),
    "torchvision:vit_b_32": (
        {}, ["stem", *(f"encoder.layers.encoder_layer_{n}" for n in range(12)), "encoder.ln", "head"],
        ["stem", *map(str, range(12)), "ln", "head"],
        {"patch embedding", "position embedding", "tokens", "attention qkv", "attention proj", "MLP", "norms", "head"},
    ),
    f"{HF}ViTForImageClassification": (
        {"num_hidden_layers": 2}, ["stem", "vit.layers.0", "vit.layers.1", "vit.layernorm", "head"],
        ["stem", "0", "1", "layernorm", "head"],
        {"patch embedding", "position embedding", "tokens", "attention qkv", "attention proj", "MLP", "norms", "head"},
    ),
    f"{HF}Dinov2ForImageClassification": (
        {"num_hidden_layers": 2},
        ["stem", "dinov2.encoder.layer.0", "dinov2.encoder.layer.1", "dinov2.layernorm", "head"],
        ["stem", "0", "1", "layernorm", "head"],
        {"patch embedding", "position embedding", "tokens", "attention qkv", "attention proj", "MLP", "norms",
         "layer scale", "head"},
    ),
    "resnet18": (
        {}, ["stem", *(f"layer{s}.{b}" for s in (1, 2, 3, 4) for b in (0, 1)), "head"],
        ["stem", *(f"{s}.{b}" for s in (1, 2, 3, 4) for b in (0, 1)), "head"],
        {"convolution", "downsampling", "norms", "head"},
    ),
    "torchvision:resnet18": (
        {}, ["stem", *(f"layer{s}.{b}" for s in (1, 2, 3, 4) for b in (0, 1)), "head"],
        ["stem", *(f"{s}.{b}" for s in (1, 2, 3, 4) for b in (0, 1)), "head"],
        {"convolution", "downsampling", "norms", "head"},
    ),
    "convnext_atto": (
        {"depths": [1, 2, 1, 1]},
        ["stem", "stages.0.blocks.0", "stages.1.downsample", "stages.1.blocks.0", "stages.1.blocks.1",
         "stages.2.downsample", "stages.2.blocks.0", "stages.3.downsample", "stages.3.blocks.0", "head.norm", "head"],
        ["stem", "0.0", "1.downsample", "1.0", "1.1", "2.downsample", "2.0", "3.downsample", "3.0", "norm", "head"],
        {"convolution", "MLP", "downsampling", "norms", "layer scale", "head"},
    ),
    "torchvision:efficientnet_b0": (
        {}, [], [], {"convolution", "squeeze-excitation", "norms", "head"},
    ),
    "efficientnet_lite0": ({}, [], [], {"convolution", "norms", "head"}),
    "torchvision:convnext_tiny": ({}, [], [], {"convolution", "MLP", "norms", "layer scale", "head"}),
    "densenet121": ({}, [], [], {"convolution", "downsampling", "norms", "head"}),
    "swin_tiny_patch4_window7_224": (
        {}, [], [],
        {"patch embedding", "position embedding", "attention qkv", "attention proj", "MLP", "downsampling", "norms",
         "head"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(NETWORKS))
def test_layers_of_known_networks(name: str) -> None:
    arguments, names, labels, components = NETWORKS[name]
    with torch.device("meta"):
        network = create_network(name, num_classes=3, **arguments)
    layers = layers_of(places_of(network.module, network.head), network.head)
    assert {layer.component(part) for layer in layers for part in layer.parts} == components
    assert sum(len(layer.parts) for layer in layers) == len(list(network.module.parameters()))
    assert (layers[0].kind, layers[-1].kind) == ("stem", "head")
    if names:
        assert [layer.name for layer in layers] == names
        assert [layer.label for layer in layers] == labels


def test_the_stages_of_cnns_are_in_order_and_their_blocks_are_layers() -> None:
    counts = {"efficientnet_lite0": 16, "torchvision:efficientnet_b0": 16, "torchvision:convnext_tiny": 18}
    for name, count in counts.items():
        with torch.device("meta"):
            network = create_network(name, num_classes=3)
        layers = layers_of(places_of(network.module, network.head), network.head)
        blocks = [tuple(map(int, layer.label.split("."))) for layer in layers if layer.kind == "block"]
        assert len(blocks) == count
        assert blocks == sorted(blocks)


def test_a_network_that_cannot_be_built_is_grouped_by_name() -> None:
    shapes = [("b.10.weight", (2, 2)), ("b.9.weight", (2, 2)), ("b.9.running_mean", (2,)), ("fc.weight", (2, 2))]
    places = places_by_name(shapes)
    assert [place.name for place in places] == ["b.9.weight", "b.10.weight", "fc.weight"]
    assert [layer.name for layer in layers_of(places, ("fc",))] == ["b", "head"]
    assert component_of(places_by_name([("bn1.weight", (3,))])[0]) == "norms"


# --- pools on disk --------------------------------------------------------------------------------------------


def test_an_authors_own_network_works_without_it_and_says_what_is_lost(tmp_path: Path) -> None:
    make_pool("hand_written", base=True).save(tmp_path / "pool")
    drift = analyse_drift(tmp_path / "pool")
    built = analyse_drift(tmp_path / "pool", network=HandWritten())
    assert BY_NAME in drift.notes
    assert BY_NAME not in built.notes
    assert [layer.name for layer in built.layers] == ["stem", "norm", "mix", "head"]
    by_name = {layer.name: layer.whole for layer in drift.layers}
    for layer in built.layers:
        assert by_name[layer.name] == layer.whole
    # 'scale' is a buffer; without the network nothing tells it from a parameter, and the note says so.
    assert set(by_name) - {layer.name for layer in built.layers} == {"scale"}


def test_the_order_of_experts_changes_no_mean(tmp_path: Path) -> None:
    pool = make_pool("vit", base=True)
    pool.save(tmp_path / "one")
    experts = make_experts(FACTORIES["vit"])
    turned = {name: experts[name] for name in reversed(experts)}
    again = ms.ExpertPool.from_modules(turned, classes=CLASSES, base=make_base(FACTORIES["vit"]))
    again.save(tmp_path / "other")
    for one, other in zip(
        analyse_drift(tmp_path / "one").layers, analyse_drift(tmp_path / "other").layers, strict=True
    ):
        assert one.whole.mean_angle == pytest.approx(other.whole.mean_angle)
        assert one.whole.mean_norm_ratio == pytest.approx(other.whole.mean_norm_ratio)
        assert one.whole.measured_loss == pytest.approx(other.whole.measured_loss)


def write_vits(folder: Path, change: Callable[[str, dict[str, Tensor]], None], names: tuple[str, ...]) -> None:
    """Experts straight to disk, past the checks of a pool that is built in memory."""
    network = create_network("vit_tiny_patch16_224", num_classes=len(CLASSES), img_size=16, patch_size=8, embed_dim=32,
                             depth=2, num_heads=2)  # fmt: skip
    for name, expert in make_experts(FACTORIES["vit"], names).items():
        state = dict(expert.state_dict())
        change(name, state)
        write_expert(folder / name, state, ExpertCard.for_network(name, network, CLASSES))


def test_damage_is_named(tmp_path: Path) -> None:
    def spoil(name: str, state: dict[str, Tensor]) -> None:
        if name == "b":
            state["blocks.1.mlp.fc1.weight"] = state["blocks.1.mlp.fc1.weight"] * torch.nan

    def lack(name: str, state: dict[str, Tensor]) -> None:
        if name == "b":
            del state["norm.bias"]

    def reshape(name: str, state: dict[str, Tensor]) -> None:
        if name == "b":
            state["norm.bias"] = torch.zeros(7)

    write_vits(tmp_path / "spoilt", spoil, ("a", "b"))
    with pytest.raises(CheckpointError, match=r"'b': 'blocks.1.mlp.fc1.weight' holds NaN"):
        analyse_drift(tmp_path / "spoilt")
    write_vits(tmp_path / "lacking", lack, ("a", "b"))
    with pytest.raises(CheckpointError, match=r"'b': 'norm.bias' cannot be read"):
        analyse_drift(tmp_path / "lacking")
    write_vits(tmp_path / "reshaped", reshape, ("a", "b"))
    with pytest.raises(CheckpointError, match=r"'b': 'norm.bias' has shape \(7,\)"):
        analyse_drift(tmp_path / "reshaped")
    weights = tmp_path / "lacking" / "a" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\x00\x01")
    with pytest.raises(CheckpointError, match="sha-256"):
        analyse_drift(tmp_path / "lacking")


def test_no_pool_and_an_empty_pool_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="no pool"):
        analyse_drift(tmp_path / "absent")
    with pytest.raises(PoolError, match="No expert"):
        analyse_drift(tmp_path)


def test_frozen_layers_and_zero_heads_are_drawn_and_described(tmp_path: Path) -> None:
    def zero(_: str, state: dict[str, Tensor]) -> None:
        for name in ("head.weight", "head.bias"):
            state[name] = torch.zeros_like(state[name])

    write_vits(tmp_path / "pool", zero, ("a", "b"))
    drift = analyse_drift(tmp_path / "pool")
    assert all(static_figure(figure).axes for figure in figures_of(drift))
    assert drift.layers[-1].whole.mean_angle is None
    assert any("all zero" in sentence for sentence in describe_drift(drift))


# --- memory ---------------------------------------------------------------------------------------------------

MEASURE = """
import sys
import timm, torch, mergestream
from mergestream.bench.drift.pool_drift import analyse_drift
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
analyse_drift(sys.argv[1])  # on a small pool: what libraries load late is loaded
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
analyse_drift(sys.argv[2])
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is the kernel's VmHWM")
def test_a_large_pool_needs_two_layers_of_memory(tmp_path: Path) -> None:
    make_pool("vit", base=True).save(tmp_path / "small")
    classes = ("a", "b")
    network = create_network("vit_base_patch32_224", num_classes=2, depth=4)
    layer = 4 * sum(tensor.numel() for tensor in network.module.blocks[0].parameters())
    state = network.module.state_dict()
    for name in ("lyon", "brest", "turin", "base"):
        state["head.weight"] = torch.randn(2, 768)
        write_expert(tmp_path / "large" / name, state, ExpertCard.for_network(name, network, classes))
    size = sum(path.stat().st_size for path in (tmp_path / "large").glob("*/weights.safetensors"))
    line = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert size > 8 * 2 * layer
    assert int(done.stdout) < 2 * layer


# --- what is written ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drift")
    make_pool("vit", base=True).save(folder / "pool")
    done = command("drift", str(folder / "pool"), "--out", str(folder / "out"))
    assert done.returncode == 0, done.stderr
    (folder / "output.txt").write_text(done.stdout)
    return folder


def test_the_command_writes_numbers_figures_and_a_page(written: Path) -> None:
    drift = analyse_drift(written / "pool")
    record = json.loads((written / "out" / "drift.json").read_text())
    jsonschema.validate(record, SCHEMA)
    assert Drift.load(written / "out" / "drift.json") == Drift.from_json(record) == drift
    pairs = [f"pair_{one}_{other}" for one, other in drift.pairs]
    names = {f"{name}.{kind}" for name in (*FIGURE_NAMES, *pairs) for kind in FORMATS}
    assert {path.name for path in (written / "out" / "figures").iterdir()} == names
    output = (written / "output.txt").read_text()
    blocks = np.mean([layer.whole.mean_angle for layer in drift.layers if layer.kind == "block"])
    assert f"Encoder blocks: {blocks:.1f} degrees apart on average" in output
    head = drift.layers[-1].whole
    assert f"The head: {head.mean_angle:.1f} degrees apart on average" in output
    assert f"averaging loses {head.measured_loss:.1f} % of the signal there" in output
    above = [layer.name for layer in drift.layers if (layer.whole.mean_angle or 0) > 45]
    assert "head" in above
    assert f"Layers more than 45 degrees apart: {', '.join(above)}." in output


def test_an_expert_that_is_left_out_changes_no_other_pair(written: Path) -> None:
    whole = analyse_drift(written / "pool")
    gone, *rest = whole.experts
    part = analyse_drift(written / "pool", without=[gone])
    assert part.experts == tuple(rest)
    positions = [place for place, pair in enumerate(whole.pairs) if gone not in pair]
    for mine, every in zip(part.layers, whole.layers, strict=True):
        assert mine.whole.angles == tuple(every.whole.angles[place] for place in positions)
    for number, figure in enumerate(pair_heat_maps(part)):
        head = part.layers[-1].components["head"].angles[number]
        assert figure.heat is not None
        assert figure.heat[figure.heat_rows.index("head"), -1] == head
    with pytest.raises(UnknownNameError, match="nobody"):
        analyse_drift(written / "pool", without=["nobody"])


def test_the_page_is_whole_and_asks_for_nothing(written: Path) -> None:
    page = (written / "out" / "drift.html").read_text(encoding="utf-8")
    assert not re.search(r"<script[^>]* src=", page)
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"https?://|<link|<img|<iframe", markup)
    assert page.count('class="plotly-graph-div"') == len(FIGURE_NAMES)
    assert all(figure.title in page for figure in figures_of(Drift.load(written / "out" / "drift.json")))
    assert "For research. Not a medical device." in page


def test_errors_on_the_command_line_are_one_line(tmp_path: Path) -> None:
    done = command("drift", str(tmp_path / "absent"), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith("mergestream: There is no pool at")
    assert len(done.stderr.splitlines()) == 1


def test_without_plotly_figures_are_written_and_the_extra_is_named(tmp_path: Path, monkeypatch) -> None:
    make_pool("vit", names=("lyon",), base=True).save(tmp_path / "pool")
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(InputError, match=r"mergestream\[report\]"):
        run_drift(tmp_path / "pool", tmp_path / "out", quiet, "command")
    assert (tmp_path / "out" / "figures" / "drift_from_base.svg").is_file()
    assert (tmp_path / "out" / "drift.json").is_file()


def test_figures_show_the_numbers_that_are_in_the_record(written: Path) -> None:
    drift = Drift.load(written / "out" / "drift.json")
    figures = {figure.name: static_figure(figure) for figure in figures_of(drift)}
    (ax,) = figures["signal_loss"].axes
    lines = {line.get_label(): line.get_ydata() for line in ax.lines}
    assert lines["measured on the mean of all"] == pytest.approx([layer.whole.measured_loss for layer in drift.layers])
    assert lines["implied by the mean angle of two"] == pytest.approx(
        [layer.whole.implied_loss for layer in drift.layers]
    )
    (ax,) = figures["weights_and_biases"].axes
    assert {text.get_text() for text in ax.texts} >= {"45°", "80°"}
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["stem", "0", "1", "norm", "head"]
    for figure in figures.values():
        assert all(axis.get_ylabel() or axis.images or axis.get_label() == "<colorbar>" for axis in figure.axes)


def test_one_expert_is_told_and_drawn(tmp_path: Path) -> None:
    make_pool("vit", names=("lyon",), base=True).save(tmp_path / "pool")
    drift = run_drift(tmp_path / "pool", tmp_path / "out", quiet, "command")
    assert drift.pairs == []
    assert {path.stem for path in (tmp_path / "out" / "figures").iterdir()} == {"drift_from_base"}
    assert describe_drift(drift)[0] == "One expert (lyon): there is no pair to compare."
    assert all(layer.whole.mean_angle is None and layer.whole.measured_loss == 0 for layer in drift.layers)
    jsonschema.validate(json.loads((tmp_path / "out" / "drift.json").read_text()), SCHEMA)
    assert (tmp_path / "out" / "drift.html").read_text().count('class="plotly-graph-div"') == 1


def test_a_pool_without_base_says_so(tmp_path: Path) -> None:
    make_pool("vit").save(tmp_path / "pool")
    drift = analyse_drift(tmp_path / "pool")
    assert not any("from_base" in figure.name for figure in figures_of(drift))
    assert any("no base/" in sentence for sentence in describe_drift(drift))
    assert "no base/" in render_drift(drift, "command")


def test_a_foreign_record_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not a drift record"):
        Drift.from_json({"schema_version": 1})
