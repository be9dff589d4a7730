"""The pool: its bank, its files, and everything that must not get in."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mergestream as ms
from conftest import CLASSES, NAMES, HandWritten, make_experts, make_images, make_pool, micro_vit
from mergestream.networks.architecture import create_network, logits_of
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.execution import Execution
from mergestream.pool.expert_card import ExpertCard, read_card
from mergestream.runtime.files import write_json, write_text

MICRO = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
NETWORK = "vit_tiny_patch16_224"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pool on disk: three experts and their base, made through the public functions only."""
    root = tmp_path / "pool"
    torch.manual_seed(0)
    start = create_network(NETWORK, num_classes=len(CLASSES), **MICRO)
    base = write_expert(root / "base", start.module.state_dict(), ExpertCard.for_network("base", start, CLASSES))
    for name, module in make_experts(micro_vit).items():
        card = ExpertCard.for_network(
            name, start, CLASSES, domain=name, class_counts={"round": 3}, base_sha256=base.weights_sha256
        )
        write_expert(root / name, module.state_dict(), card)
    return root


def edit_card(folder: Path, **changes: object) -> None:
    card = json.loads((folder / "expert.json").read_text())
    write_json(folder / "expert.json", {**card, **changes})


def rewrite(folder: Path, change) -> None:
    """Write changed weights with a card that vouches for them."""
    state = load_file(folder / "weights.safetensors")
    card = read_card(folder)
    write_expert(folder, change(state), card)


# --- what it is ---------------------------------------------------------------------------------------------


def test_load_gives_the_same_pool_as_from_modules(folder: Path) -> None:
    loaded = ms.ExpertPool.load(folder)
    experts = make_experts(micro_vit)
    live = ms.ExpertPool.from_modules({name: experts[name] for name in sorted(NAMES)}, classes=CLASSES)
    assert loaded.names == tuple(sorted(NAMES))
    assert loaded.classes == CLASSES
    assert torch.equal(loaded.bank, live.bank)
    images = make_images()
    assert torch.equal(loaded.logits(images), live.logits(images))
    assert loaded.base is not None
    assert live.base is None


def test_the_bank_is_contiguous_encoder_then_head(pool: ms.ExpertPool) -> None:
    assert pool.bank.is_contiguous()
    assert pool.bank.shape == (3, pool.layout.size)
    head = [e for e in pool.layout.entries if e.name.startswith(pool.template.head[0] + ".")]
    assert {e.start >= pool.layout.encoder_size for e in head} == {True}
    assert sum(e.end - e.start for e in head) == pool.layout.size - pool.layout.encoder_size
    assert all(e.start % 64 == 0 for e in pool.layout.entries)
    floating = {t.data_ptr(): t.numel() for t in HandWritten().state_dict().values() if t.is_floating_point()}
    if "HandWritten" in str(pool):
        assert pool.layout.numbers == sum(floating.values())  # the tied layer is there once


def test_merged_parameters_are_views_of_one_buffer(pool: ms.ExpertPool) -> None:
    weights = pool.merge([0.2, 0.3, 0.5])
    module = pool.module_with(weights)
    storage = weights.untyped_storage().data_ptr()
    named = {entry.name for entry in pool.layout.entries}
    tensors = [t for n, t in [*module.named_parameters(), *module.named_buffers()] if n in named]
    assert len(tensors) == len(named)
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == {storage}


def test_a_network_is_merged_tensor_by_tensor(pool: ms.ExpertPool) -> None:
    a, h = [0.2, 0.3, 0.5], [0.6, 0.4, 0.0]
    experts = [pool.expert(k).state_dict() for k in range(len(pool))]
    head = tuple(f"{part}." for part in pool.template.head)
    for name, merged in pool.network(encoder=a, head=h).state_dict().items():
        if merged.is_floating_point() and name in {entry.name for entry in pool.layout.entries}:
            shares = h if name.startswith(head) else a
            expected = sum(share * state[name].double() for share, state in zip(shares, experts, strict=True))
            torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=1e-6)


def test_network_is_ordinary_frozen_and_independent(pool: ms.ExpertPool) -> None:
    a, h = [0.2, 0.3, 0.5], [0.6, 0.4, 0.0]
    network = pool.network(encoder=a, head=h)
    assert isinstance(network, nn.Module)
    assert not network.training
    assert not any(p.requires_grad for p in network.parameters())
    batch = pool.prepare(make_images())
    with torch.no_grad():
        torch.testing.assert_close(network(batch), pool.forward(pool.merge(a, h), batch))
    before = pool.fingerprint()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert pool.fingerprint() == before
    rebuilt = {name: tensor for name, tensor in network.state_dict().items() if "num_batches" in name}
    assert all(int(value) == 3 for value in rebuilt.values())  # integer buffers: the maximum


def test_without_keeps_order_and_answers(pool: ms.ExpertPool) -> None:
    images = make_images()
    whole = pool.logits(images)
    for k, name in enumerate(NAMES):
        rest = pool.without(name)
        others = [j for j in range(3) if j != k]
        assert rest.names == tuple(NAMES[j] for j in others)
        assert rest.bank.is_contiguous()
        assert torch.equal(rest.logits(images), whole[others])
    with pytest.raises(ms.MergestreamError, match="Did you mean 'lyon'"):
        pool.without("lyonn")
    with pytest.raises(ms.MergestreamError, match="empty"):
        pool.without(*NAMES)


@pytest.mark.parametrize("kind", ["vit", "resnet", "hand_written"])
def test_bfloat16_gives_the_same_top_class_where_the_classes_are_apart(kind: str) -> None:
    """Above the rounding of eight bits; scores and logits are in fp32."""
    pool, images = make_pool(kind), make_images(64)
    step = ms.create_method("entropy_adaptive", pool).step(images)
    narrow = ms.create_method("entropy_adaptive", pool.to(dtype=torch.bfloat16)).step(images)
    assert narrow.logits.dtype == narrow.entropy.dtype == torch.float32
    first, second = step.logits.topk(2, dim=-1).values.unbind(dim=-1)
    apart = first - second > 0.02 * step.logits.abs().amax()
    same = step.logits.argmax(dim=-1) == narrow.logits.argmax(dim=-1)
    assert apart.float().mean() > 0.5
    assert same[apart].float().mean() >= 0.995


def test_to_changes_type_and_leaves_the_original(pool: ms.ExpertPool) -> None:
    half = pool.to(dtype=torch.bfloat16)
    assert half.bank.dtype == torch.bfloat16
    assert pool.bank.dtype == torch.float32
    assert half.fingerprint() != pool.fingerprint()
    assert half.logits(make_images()).dtype == torch.float32


def test_fingerprint_sees_order_names_classes_and_every_bit() -> None:
    pool = make_pool("vit")
    seen = {pool.fingerprint(), make_pool("vit", ("lyon", "brest", "nice")).fingerprint()}
    experts = make_experts(micro_vit)
    seen.add(ms.ExpertPool.from_modules(dict(reversed(experts.items())), classes=CLASSES).fingerprint())
    seen.add(ms.ExpertPool.from_modules(experts).fingerprint())
    pool.bank[2, -1] += 1e-6
    seen.add(pool.fingerprint())
    assert len(seen) == 5


def test_images_of_any_size_are_prepared_and_floats_pass(vit_pool: ms.ExpertPool) -> None:
    odd = torch.randint(0, 256, (2, 3, 33, 21), dtype=torch.uint8)
    assert vit_pool.prepare(odd).shape == (2, 3, 16, 16)
    ready = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(vit_pool.prepare(ready), ready.float())


def test_a_convolutional_network_takes_floats_of_another_size() -> None:
    pool = make_pool("hand_written")
    assert ms.create_method("mean", pool)(torch.randn(2, 3, 40, 24)).shape == (2, len(CLASSES))


def test_save_and_load_again(tmp_path: Path, pool: ms.ExpertPool) -> None:
    pool.save(tmp_path / "pool")
    kinds = {"VisionTransformer": micro_vit, "ResNet": None, "HandWritten": HandWritten}
    factory = next((f for key, f in kinds.items() if key in str(pool)), None)
    module = factory() if factory else __import__("conftest").micro_resnet()
    loaded = ms.ExpertPool.load(tmp_path / "pool", network=module)
    assert loaded.names == pool.names == ("lyon", "brest", "turin")  # the order is recorded, not that of names
    assert torch.equal(loaded.bank, pool.bank)
    if "custom" in str(pool):  # a plain timm network is recognised and built again by name
        with pytest.raises(ms.MergestreamError, match="network=YourNetwork"):
            ms.ExpertPool.load(tmp_path / "pool")
    else:
        assert torch.equal(ms.ExpertPool.load(tmp_path / "pool").bank, loaded.bank)


def test_recorded_order_with_added_and_missing_experts(folder: Path, tmp_path: Path) -> None:
    pool = ms.ExpertPool.load(folder)
    assert pool.names == ("brest", "lyon", "turin")
    shuffled = ms.ExpertPool.from_modules(make_experts(micro_vit, ("turin", "brest")), classes=CLASSES)
    shuffled.save(tmp_path / "saved")
    assert ms.ExpertPool.load(tmp_path / "saved", network=micro_vit()).names == ("turin", "brest")
    (tmp_path / "saved" / "turin").rename(tmp_path / "elsewhere")
    with pytest.raises(ms.MergestreamError, match="lists the expert 'turin'"):
        ms.ExpertPool.load(tmp_path / "saved", network=micro_vit())


def test_base_is_kept_on_disk_and_through_copies(folder: Path, tmp_path: Path) -> None:
    pool = ms.ExpertPool.load(folder)
    assert pool.base.shape == (pool.layout.size,)
    assert torch.equal(pool.without("lyon").base, pool.base)
    assert pool.to(dtype=torch.bfloat16).base.dtype == torch.bfloat16
    pool.save(tmp_path / "again")
    again = ms.ExpertPool.load(tmp_path / "again")
    assert torch.equal(again.base, pool.base)
    assert again.fingerprint() == pool.fingerprint()


def test_mixed_types_are_held_without_loss(folder: Path) -> None:
    rewrite(folder / "lyon", lambda state: {k: v.half() for k, v in state.items()})
    pool = ms.ExpertPool.load(folder)
    assert pool.bank.dtype == torch.float32
    assert ms.ExpertPool.load(folder, dtype=torch.bfloat16).bank.dtype == torch.bfloat16


def test_recurrent_layers_follow_their_views() -> None:
    """cuDNN layers keep a second list of their weights; it must point into the bank too."""

    class Rnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.fc = nn.GRU(12, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.fc(self.gru(images.flatten(2).transpose(1, 2).reshape(len(images), -1, 12))[0][:, -1])

    experts = make_experts(Rnn, ("a", "b"))
    pool = ms.ExpertPool.from_modules(experts)
    images = torch.randn(2, 3, 4, 4)
    with torch.no_grad():
        for k, module in enumerate(experts.values()):
            torch.testing.assert_close(pool.forward(pool.merge([1.0 - k, float(k)]), images), module(images))


# --- what must not get in -----------------------------------------------------------------------------------


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ms.MergestreamError, match=message):
        ms.ExpertPool.load(folder)


def test_an_empty_pool_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "No expert in")
    refused(tmp_path / "missing", "There is no pool at")
    with pytest.raises(ms.MergestreamError, match="at least one expert"):
        ms.ExpertPool.from_modules({})
    with pytest.raises(ms.MergestreamError, match="cannot be called 'base'"):
        ms.ExpertPool.from_modules({"base": micro_vit()})


def test_another_architecture_is_refused(folder: Path) -> None:
    other = create_network(NETWORK, num_classes=len(CLASSES), **{**MICRO, "depth": 1})
    write_expert(folder / "lyon", other.module.state_dict(), ExpertCard.for_network("lyon", other, CLASSES))
    refused(folder, "'lyon' and 'brest' differ in network")
    with pytest.raises(ms.MergestreamError, match="is a HandWritten, not a VisionTransformer"):
        ms.ExpertPool.from_modules({"a": micro_vit(), "b": HandWritten()})


def test_same_shapes_built_differently_are_refused() -> None:
    """Two or four attention heads: every tensor fits, and the function is another one."""
    four = timm.create_model(NETWORK, num_classes=len(CLASSES), **{**MICRO, "num_heads": 4})
    with pytest.raises(ms.MergestreamError, match=r"'b' is built differently from 'a': blocks.0.attn.num_heads is 2"):
        ms.ExpertPool.from_modules({"a": micro_vit(), "b": four})
    regularised = timm.create_model(NETWORK, num_classes=len(CLASSES), **MICRO, drop_rate=0.5, drop_path_rate=0.2)
    assert len(ms.ExpertPool.from_modules({"a": micro_vit(), "b": regularised.train()})) == 2


def test_modules_of_other_preprocessing_are_refused() -> None:
    other = micro_vit()
    other.pretrained_cfg = {**other.pretrained_cfg, "mean": (0.1, 0.2, 0.3)}
    with pytest.raises(ms.MergestreamError, match="'b' differs in preprocessing"):
        ms.ExpertPool.from_modules({"a": micro_vit(), "b": other})


def test_other_classes_and_another_order_are_refused(folder: Path) -> None:
    edit_card(folder / "lyon", classes=["round", "spiculated", "ring", "divided", "odd"])
    refused(folder, "differ in classes")
    edit_card(folder / "lyon", classes=list(reversed(CLASSES)))
    refused(folder, "in another order")


def test_another_preprocessing_is_refused(folder: Path) -> None:
    card = read_card(folder / "lyon")
    changed = replace(card, preprocessing=replace(card.preprocessing, mean=(0.4, 0.5, 0.5)))
    write_json(folder / "lyon" / "expert.json", changed.to_json())
    refused(folder, "differ in preprocessing")


def test_another_base_is_refused(folder: Path) -> None:
    edit_card(folder / "lyon", base_sha256="0" * 64)
    refused(folder, "not trained from this pool's base")


def test_missing_and_extra_tensors_and_shapes_are_refused(folder: Path) -> None:
    original = load_file(folder / "lyon" / "weights.safetensors")
    rewrite(folder / "lyon", lambda s: {k: v for k, v in s.items() if k != "norm.weight"})
    refused(folder, r"Expert 'lyon' lacks 1 tensor\(s\): norm.weight")
    rewrite(folder / "lyon", lambda _: {**original, "extra.weight": torch.zeros(3)})
    refused(folder, r"has unexpected 1 tensor\(s\): extra.weight")
    rewrite(folder / "lyon", lambda _: {**original, "head.weight": torch.zeros(1, 32)})
    refused(folder, r"'head.weight' has shape \(1, 32\), the network needs \(5, 32\)")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_in_weights_are_refused(folder: Path, value: float) -> None:
    def poison(state: dict) -> dict:
        state["blocks.1.mlp.fc1.weight"][3, 3] = value
        return state

    rewrite(folder / "lyon", poison)
    refused(folder, "'lyon': 'blocks.1.mlp.fc1.weight' holds NaN or Inf")


def test_truncated_and_tampered_files_are_refused(folder: Path) -> None:
    path = folder / "lyon" / "weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    refused(folder, "does not match the sha-256")
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(folder, "does not match the sha-256")
    path.unlink()
    refused(folder, "is missing")


def test_a_truncated_file_that_its_card_vouches_for_is_refused(folder: Path) -> None:
    from mergestream.runtime.files import sha256_of_file

    path = folder / "lyon" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    edit_card(folder / "lyon", weights_sha256=sha256_of_file(path))
    refused(folder, "is not a safetensors file")


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
@pytest.mark.parametrize("kind", ["zip", "pickle"])
def test_a_pickle_is_refused_unopened(folder: Path, name: str, kind: str) -> None:
    (folder / "lyon" / "weights.safetensors").unlink()
    if kind == "zip":
        torch.save(Bomb(), folder / "lyon" / name)
    else:
        (folder / "lyon" / name).write_bytes(pickle.dumps(Bomb()))
    refused(folder, "is a pickle.*weights_only=True")


def test_damaged_foreign_and_future_cards_are_refused(folder: Path) -> None:
    card = folder / "lyon" / "expert.json"
    good = card.read_text()
    card.write_text(good[:50])
    refused(folder, "not readable JSON")
    edit = json.loads(good)
    card.write_text(json.dumps({**edit, "schema_version": 99}))
    refused(folder, "schema_version 99; this mergestream reads version 1")
    del edit["classes"]
    card.write_text(json.dumps(edit))
    refused(folder, "'classes' is a required property")
    card.write_text("[]")
    refused(folder, "schema_version None")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(2, 1, 16, 16, dtype=torch.uint8), "takes 3 channels, the batch has 1"),
        (torch.zeros(2, 16, 16, 3, dtype=torch.uint8), "The channels come last in"),
        (torch.zeros(0, 3, 16, 16, dtype=torch.uint8), "empty"),
        (torch.zeros(3, 16, 16, dtype=torch.uint8), "images\\[None\\]"),
        (torch.zeros(2, 3, 0, 16, dtype=torch.uint8), "shape"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.int64), "got torch.int64"),
        (torch.zeros(2, 3, 20, 20), r"cannot take a batch of shape \(2, 3, 20, 20\) \(the pool's"),
        ([[1, 2]], "got list"),
    ],
)
def test_bad_batches_are_refused(vit_pool: ms.ExpertPool, batch, message: str) -> None:
    with pytest.raises(ms.MergestreamError, match=message):
        vit_pool.logits(batch)


def test_nan_logits_name_the_expert_and_the_image(vit_pool: ms.ExpertPool) -> None:
    images = torch.zeros(4, 3, 16, 16)
    images[2, 0, 0, 0] = float("nan")
    with pytest.raises(ms.MergestreamError, match=r"Expert 'lyon' gave NaN or Inf for image 2 .*\(1 in all\)"):
        vit_pool.logits(images)
    with pytest.raises(ms.MergestreamError, match="The merged model gave NaN"):
        vit_pool.forward(vit_pool.merge([0.5, 0.5, 0.0]), images)


def test_pixels_without_known_preprocessing_are_refused() -> None:
    pool = ms.ExpertPool.from_modules({"a": HandWritten()})
    with pytest.raises(ms.MergestreamError, match="preprocessing is unknown"):
        pool.logits(make_images())


def test_wrong_numbers_of_classes_are_refused() -> None:
    with pytest.raises(ms.MergestreamError, match="2 classes were given, but the head answers 5"):
        ms.ExpertPool.from_modules({"a": micro_vit()}, classes=("x", "y"))
    with pytest.raises(ms.MergestreamError, match="give classes="):
        ms.ExpertPool.from_state_dicts({"a": micro_vit().state_dict()}, NETWORK)


def test_state_dicts_and_a_name() -> None:
    experts = make_experts(lambda: create_network("resnet18", num_classes=2).module, ("a", "b"))
    states = {name: module.state_dict() for name, module in experts.items()}
    pool = ms.ExpertPool.from_state_dicts(states, "resnet18", classes=("no", "yes"), base=states["a"])
    assert torch.equal(pool.base, pool.bank[0])
    assert pool.logits(make_images(2, 32)).shape == (2, 2, 2)
    del states["b"]["fc.bias"]
    with pytest.raises(ms.MergestreamError, match="Expert 'b' lacks"):
        ms.ExpertPool.from_state_dicts(states, "resnet18", classes=("no", "yes"))


def test_tied_tensors_that_differ_are_refused() -> None:
    state = HandWritten().state_dict()
    state["mix_again.weight"] = state["mix.weight"] + 1
    with pytest.raises(ms.MergestreamError, match="tied but differ"):
        ms.ExpertPool.from_state_dicts({"a": state}, HandWritten())


# --- nothing is lost ----------------------------------------------------------------------------------------

FULL_DISK = """
import resource, signal, sys, torch
from dataclasses import replace
from pathlib import Path
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.expert_card import read_card
from mergestream.runtime.errors import OutputError
from mergestream.runtime.files import write_text
folder = Path(sys.argv[1])
card = read_card(folder)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for attempt in (
    lambda: write_expert(folder, {"big": torch.zeros(100_000)}, replace(card, name="other")),
    lambda: write_text(folder / "expert.json", "x" * 100_000),
):
    try:
        attempt()
    except OutputError as error:
        print("refused:", error)
"""


def test_a_full_disk_in_the_middle_of_a_write_leaves_the_old_files(folder: Path) -> None:
    """A real limit of the kernel, not a mock of our writer."""
    before = {path.name: path.read_bytes() for path in (folder / "lyon").iterdir()}
    around = sorted(path.name for path in folder.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(folder / "lyon")], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("refused: Cannot write") == 2
    assert "unchanged" in done.stdout
    assert {path.name: path.read_bytes() for path in (folder / "lyon").iterdir()} == before
    assert sorted(path.name for path in folder.iterdir()) == around
    ms.ExpertPool.load(folder)


def test_an_unwritable_folder_is_refused_before_work(tmp_path: Path) -> None:
    from mergestream.runtime.files import make_folder

    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(ms.MergestreamError, match="Cannot write to the folder"):
        make_folder(blocked / "out")
    with pytest.raises(ms.MergestreamError, match="Cannot write"):
        write_text(blocked / "out" / "a.txt", "text")


@pytest.mark.slow
def test_loading_streams_into_the_bank(tmp_path: Path) -> None:
    """Peak memory of loading four experts beyond the imports, in banks; the benchmark has ViT-B/32."""
    network = create_network("vit_tiny_patch16_224", num_classes=3, embed_dim=768, num_heads=12, depth=6, img_size=32)
    for name in "abcd":
        write_expert(
            tmp_path / name, network.module.state_dict(), ExpertCard.for_network(name, network, ("x", "y", "z"))
        )
    script = """
import resource, sys, mergestream as ms, timm
def rss(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = rss()
pool = ms.ExpertPool.load(sys.argv[1])
# Not getrusage's: that one begins with the peak of the process which started this one.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
print((peak - before) / pool.bank.nbytes)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.3  # a second copy of one expert would make it 1.4 or more


def test_saved_tensors_are_plain_safetensors(folder: Path) -> None:
    assert "head.weight" in load_file(folder / "lyon" / "weights.safetensors")
    save_file({"a": torch.zeros(1)}, folder / "loose.safetensors")  # a stray file beside the experts is no expert
    assert len(ms.ExpertPool.load(folder)) == 3


@pytest.mark.parametrize("name", ["torchvision:resnet18", "resnet18"])
def test_state_dicts_of_a_named_network_keep_its_name(name: str, tmp_path: Path) -> None:
    states = {}
    for seed, site in enumerate(("lyon", "brest")):
        torch.manual_seed(seed)
        states[site] = create_network(name, num_classes=2).module.state_dict()
    pool = ms.ExpertPool.from_state_dicts(states, name, classes=("a", "b"))
    pool.save(tmp_path / "pool")
    assert ms.ExpertPool.load(tmp_path / "pool").fingerprint() == pool.fingerprint()
    assert pool.template.architecture.library == ("torchvision" if ":" in name else "timm")


def test_narrow_scores_leave_the_merged_model_as_it_is(pool: ms.ExpertPool, images: Tensor) -> None:
    narrow = pool.to(execution=Execution(narrow_scores=True))
    exact, rough = (ms.create_method("entropy_adaptive", each).step(images) for each in (pool, narrow))
    assert 0 < (exact.entropy - rough.entropy).abs().max() < 0.05
    merged = pool.network(rough.encoder_coefficients, rough.head_coefficients)
    assert rough.logits.dtype == torch.float32
    assert narrow.fingerprint() != pool.fingerprint()  # other answers, so another run
    torch.testing.assert_close(rough.logits, logits_of(merged(pool.prepare(images))))
