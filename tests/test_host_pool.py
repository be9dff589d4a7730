"""Pools larger than the device: experts that pass through two staged rows answer as those that lie on the device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mergestream as ms
from conftest import CLASSES, FACTORIES, NAMES, PREPROCESSING, HandWritten, make_experts, make_images, make_pool
from mergestream.functional import merging
from mergestream.methods import METHODS
from mergestream.pool.execution import Execution
from mergestream.pool.host_pool import HostPool
from mergestream.pool.staging import STREAMED
from mergestream.runtime.errors import InputError, PoolError

ROOT = Path(__file__).parent.parent
STREAM = [make_images(5, seed=1), make_images(5, seed=2), make_images(2, seed=3), make_images(1, seed=4)]
CASES: list[tuple[str, dict]] = [
    ("single_expert", {"expert": "brest"}),
    ("mean", {}),
    ("mean", {"coefficients": [0.5, 0.0, 0.5]}),
    ("mean", {"recalibrate_bn": True}),
    ("mean", {"head_rows": "seen"}),
    ("ensemble", {}),
    ("ensemble", {"average": "probabilities"}),
    ("select_expert", {"score": "max_softmax"}),
    ("entropy_adaptive", {}),
    ("entropy_adaptive", {"head": "select", "momentum": 0.7}),
    ("entropy_adaptive", {"views": ("hflip", "brightness"), "momentum": 0.5}),
    ("entropy_adaptive", {"views": ()}),
    ("entropy_adaptive", {"refresh_every": 2, "momentum": 0.5}),
    ("entropy_adaptive", {"refresh_every": 100, "refresh_drift": 1e-3}),
    ("entropy_adaptive", {"recalibrate_bn": True}),
    ("entropy_adaptive", {"head_rows": "seen"}),
]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for name, options in CASES]
FIELDS = ("logits", "encoder_coefficients", "head_coefficients", "entropy", "scores", "consistency")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def architecture(pool: ms.ExpertPool) -> nn.Module:
    """A module of the pool's kind: these small networks cannot be built from their cards."""
    modules = (factory() for factory in FACTORIES.values())
    return next(module for module in modules if type(module) is type(pool.template.module))


def with_counts(pool: ms.ExpertPool) -> ms.ExpertPool:
    """Every expert saw other classes."""
    for k, name in enumerate(pool.names):
        pool = pool.annotate(name, class_counts={label: int(place != k) for place, label in enumerate(pool.classes)})
    return pool


# --- the same answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_steps_are_those_of_the_pool_bit_for_bit(
    pool: ms.ExpertPool, name: str, options: dict, dtype: torch.dtype
) -> None:
    pool = with_counts(pool.to(dtype=dtype))
    here, there = (ms.create_method(name, each, **options) for each in (pool, HostPool.of(pool, "cpu")))
    for images in STREAM:
        one, two = here.step(images), there.step(images)
        assert one.names == two.names
        assert one.head_expert == two.head_expert
        for field in FIELDS:
            mine, theirs = getattr(one, field), getattr(two, field)
            assert (mine is None) == (theirs is None), field
            assert mine is None or torch.equal(bits(mine), bits(theirs)), field
    assert here.identity == there.identity


def test_a_stream_goes_on_in_a_pool_of_the_other_kind() -> None:
    pool = make_pool("vit")
    here, there = (ms.create_method("entropy_adaptive", p, momentum=0.8) for p in (pool, HostPool.of(pool, "cpu")))
    here.step(STREAM[0])
    there.load_state_dict(here.state_dict())
    assert torch.equal(here(STREAM[1]), there(STREAM[1]))


@pytest.mark.parametrize("first", [True, False], ids=["inference_first", "inference_last"])
def test_inference_mode_leaves_nothing_behind(first: bool) -> None:
    pool = HostPool.of(make_pool("hand_written"), "cpu")
    method = ms.create_method("entropy_adaptive", pool)
    answers = []
    for inference in (first, not first):
        with torch.inference_mode(inference):
            answers.append(method(STREAM[0]).clone())
    assert torch.equal(*answers)


def test_logits_of_views_experts_and_networks_are_the_pools(pool: ms.ExpertPool, images: Tensor) -> None:
    host = HostPool.of(pool, "cpu")
    found = host.logits_of_views(images, ("hflip", "vflip"))
    assert list(found) == ["original", "hflip", "vflip"]
    for view in found:
        wanted = pool.logits(images, None if view == "original" else view)
        assert torch.equal(found[view], wanted)
        assert torch.equal(host.logits(images, None if view == "original" else view), wanted)
    shares = [0.2, 0.5, 0.3]
    one, two = pool.network(shares).state_dict(), host.network(shares).state_dict()
    assert all(torch.equal(one[key], two[key]) for key in one)
    for k in (0, 2, -1):
        assert torch.equal(host.expert_logits(k, images), pool.expert_logits(k, images))
        mine, theirs = host.expert(k).state_dict(), pool.expert(k).state_dict()
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_an_expert_taken_out_is_not_a_staged_row(vit_pool: ms.ExpertPool, images: Tensor) -> None:
    host = HostPool.of(vit_pool, "cpu")
    module = host.expert(1)
    host.logits(images)
    assert torch.equal(module(host.prepare(images)), vit_pool.expert_logits(1, images))


class Counting(HandWritten):
    """An integer buffer that the answer depends on."""

    def __init__(self, factor: int = 1) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * self.factor


def test_every_expert_computes_with_its_own_integers(images: Tensor) -> None:
    experts = make_experts(Counting)
    for number, module in enumerate(experts.values()):
        module.factor.fill_(number + 2)
    pool = ms.ExpertPool.from_modules(experts, classes=CLASSES, preprocessing=PREPROCESSING)
    host = HostPool.of(pool, "cpu")
    assert torch.equal(host.logits(images), pool.logits(images))
    assert torch.equal(host.forward(host.merge([0.5, 0.5, 0]), images), pool.forward(pool.merge([0.5, 0.5, 0]), images))


def test_views_may_pass_as_one_batch(vit_pool: ms.ExpertPool, images: Tensor) -> None:
    """As on a GPU: fewer, larger products, the same answers up to rounding."""
    host = HostPool.of(vit_pool, "cpu")
    batches = [host.prepare(images), host.prepare(images).flip(-1)]
    apart = host._forward_each(vit_pool.expert(0), batches)
    host._computes_on = torch.device("meta")  # anything but a CPU; the tensors stay where they are
    together = host._forward_each(vit_pool.expert(0), batches)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


# --- the merge ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any), st.integers(0, 2), st.booleans())
def test_a_streamed_merge_is_the_pools(weights: list[int], chosen: int, narrow: bool) -> None:
    pool = make_pool("hand_written").to(dtype=torch.bfloat16 if narrow else torch.float32)
    host = HostPool.of(pool, "cpu")
    encoder = [weight / sum(weights) for weight in weights]
    head = [float(k == chosen) for k in range(3)]
    assert torch.equal(bits(host.merge(encoder, head)), bits(pool.merge(encoder, head)))
    active = {k for k in range(3) if encoder[k] or head[k]}
    assert host.copies == len(active)
    assert torch.equal(bits(host.merge(head)), bits(pool.bank[chosen]))


def test_other_rows_are_merged_as_they_are(vit_pool: ms.ExpertPool) -> None:
    host, rows = HostPool.of(vit_pool, "cpu"), merging.Rows.of(vit_pool.bank * 2, vit_pool.layout.encoder_size)
    assert torch.equal(host.merge([1, 0, 0], rows=rows), vit_pool.bank[0] * 2)
    assert host.copies == 0


# --- what it costs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [3, 7])
def test_a_step_copies_every_row_twice(experts: int) -> None:
    host = HostPool.of(make_pool("vit", names=tuple(f"site{k}" for k in range(experts))), "cpu")
    method = ms.create_method("entropy_adaptive", host, views=("hflip", "vflip"))
    before = 0
    for images in STREAM[:3]:
        method.step(images)
        assert host.copies - before <= 2 * experts
        before = host.copies


def test_rows_that_are_there_are_not_copied_again() -> None:
    host = HostPool.of(make_pool("vit", names=("lyon", "brest")), "cpu")
    method = ms.create_method("entropy_adaptive", host)
    for images in STREAM:
        method.step(images)
    assert host.copies == 2


class Allocations(TorchDispatchMode):
    """Counts the new memory of at least a row's size that operations return."""

    def __init__(self, known: Tensor, size: int) -> None:
        super().__init__()
        self.seen, self._size = {known.untyped_storage().data_ptr()}, size
        self.kept: list[Tensor] = []  # held, so that no address is handed out twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self._size and storage.data_ptr() not in self.seen:
                    self.seen.add(storage.data_ptr())
                    self.kept.append(tensor)
        return result


def test_two_staged_rows_and_the_merged_one_are_all_that_lies_on_the_device() -> None:
    pool = make_pool("vit", names=tuple(f"site{k}" for k in range(6)))
    row = pool.bank[0].nbytes
    with Allocations(pool.bank, row) as made:
        host = HostPool.of(pool, "cpu")
        method = ms.create_method("entropy_adaptive", host)
        for images in STREAM:
            method.step(images)
    assert [tensor.untyped_storage().nbytes() for tensor in made.kept] == [row] * 3


def test_nothing_on_the_device_is_computed_with_the_host(pool: ms.ExpertPool, images: Tensor, monkeypatch) -> None:
    """On 'meta' there are only shapes, but an operation that mixes devices is refused as on a GPU."""
    monkeypatch.setattr(torch, "isfinite", lambda values: torch.ones(1, 1, dtype=torch.bool))
    there = HostPool.of(pool, "meta")
    assert all(tensor.is_meta for tensor in there.logits_of_views(images, ("hflip", "brightness")).values())
    assert there.expert_logits(1, images).is_meta
    weights = there.merge([0.5, 0.5, 0.0], [0.0, 0.0, 1.0])
    assert weights.is_meta
    assert there.forward(weights, images).is_meta
    assert there.rows.head.is_meta
    assert all(tensor.is_meta for tensor in there.expert(0).state_dict().values())
    assert not there.bank.is_meta


# --- what it is ---------------------------------------------------------------------------------------------


def test_it_is_the_same_pool(pool: ms.ExpertPool, tmp_path: Path) -> None:
    host = HostPool.of(pool, "cpu")
    assert host.bank.data_ptr() == pool.bank.data_ptr()
    assert (host.names, host.classes, host.device) == (pool.names, pool.classes, torch.device("cpu"))
    assert (host.fingerprint(), host.base_fingerprint()) == (pool.fingerprint(), pool.base_fingerprint())
    assert repr(host).startswith("HostPool on cpu of ")
    host.save(tmp_path / "pool")
    network = architecture(pool)
    again = HostPool.load(tmp_path / "pool", device="cpu", network=network)
    assert isinstance(again, HostPool)
    assert again.fingerprint() == pool.fingerprint()
    assert again.to(dtype=torch.bfloat16).fingerprint() == pool.to(dtype=torch.bfloat16).fingerprint()
    narrow = HostPool.load(tmp_path / "pool", device="cpu", network=network, dtype=torch.bfloat16)
    assert narrow.fingerprint() == again.to(dtype=torch.bfloat16).fingerprint()


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_of_it_is_of_its_kind(vit_pool: ms.ExpertPool, images: Tensor, name: str) -> None:
    host = HostPool.of(vit_pool, "cpu")
    fewer, wanted = host.without(name), vit_pool.without(name)
    assert isinstance(fewer, HostPool)
    assert torch.equal(fewer.logits(images), wanted.logits(images))
    assert isinstance(host.annotate(name, domain="north"), HostPool)
    assert isinstance(host.to(dtype=torch.bfloat16), HostPool)
    assert HostPool.of(host, "cpu").fingerprint() == host.fingerprint()


def test_candidates_stay_on_the_host_too(vit_pool: ms.ExpertPool, images: Tensor, tmp_path: Path) -> None:
    runs = make_pool("vit", names=("lyon", "brest", "turin", "lyon2"))
    for run in runs.names:
        runs = runs.annotate(run, domain=run.rstrip("2"))
    pool = vit_pool.with_candidates(runs)
    pool.save(tmp_path / "pool")
    for host in (HostPool.of(pool, "cpu"), HostPool.load(tmp_path / "pool", device="cpu", network=architecture(pool))):
        assert isinstance(host.candidates, HostPool)
        here, there = (ms.create_method("mean", each, variant="all_runs") for each in (pool, host))
        assert torch.equal(here(images), there(images))
        fewer = host.without("lyon").candidates
        assert fewer is not None
        assert fewer.names == ("brest", "turin")


def test_steps_are_never_recorded_as_graphs(vit_pool: ms.ExpertPool) -> None:
    host = HostPool.of(vit_pool, "cpu")
    eager = host.to(execution=Execution(capture=True, overlap=2))
    for pool in (host, eager, eager.without("lyon"), eager.to(dtype=torch.bfloat16)):
        assert not pool.execution.capture
    assert eager.without("lyon").execution.overlap == 2


# --- what is refused ----------------------------------------------------------------------------------------

REFUSED = [name for name in METHODS if name not in STREAMED]
MEASURED = ("fisher", "regmean", "regmean_pp")


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in REFUSED), *((name, {"statistics": "target"}) for name in MEASURED)],
)
def test_methods_that_need_the_whole_bank_are_refused(vit_pool: ms.ExpertPool, name: str, options: dict) -> None:
    host = HostPool.of(vit_pool, "cpu")
    with pytest.raises(PoolError, match=r"all 3 experts on the device at once .* or a method"):
        ms.create_method(name, host, **options).step(STREAM[0])
    with pytest.raises(PoolError, match=f"'{name}' needs all 3 experts"):
        host.admit(name)


def test_every_method_is_decided_on() -> None:
    assert set(STREAMED) <= set(METHODS)
    host = HostPool.of(make_pool("vit"), "cpu")
    for name in STREAMED:
        host.admit(name)


def test_experts_are_measured_where_all_of_them_are(vit_pool: ms.ExpertPool) -> None:
    with pytest.raises(PoolError, match="on the device at once"):
        ms.measure_statistics(HostPool.of(vit_pool, "cpu"), {"lyon": STREAM[0]}, ["gram"])


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", 3.5])
def test_a_device_that_is_not_there_is_refused(vit_pool: ms.ExpertPool, device: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Cannot compute on"):
        HostPool.of(vit_pool, device)
    with pytest.raises(InputError, match="Cannot compute on"):
        HostPool.load(tmp_path, device=device)
    with pytest.raises(InputError, match="Cannot compute on"):
        HostPool.of(vit_pool, "cpu").to(device)


def test_bad_input_is_refused_as_the_pool_does(vit_pool: ms.ExpertPool, images: Tensor, tmp_path: Path) -> None:
    host = HostPool.of(vit_pool, "cpu")
    for wrong in (nn.Linear(2, 2), None, "pools/pacs"):
        with pytest.raises(InputError, match="made of an ExpertPool"):
            HostPool.of(wrong, "cpu")
    with pytest.raises(PoolError, match="No expert in"):
        HostPool.load(tmp_path, device="cpu")
    with pytest.raises(InputError, match="not a floating type"):
        HostPool.of(vit_pool, "cpu", torch.int8)
    for call in (
        lambda pool: pool.merge([0.5, 0.5]),
        lambda pool: pool.merge([0.5, 0.5, 0.5]),
        lambda pool: pool.merge([1, 0, 0], [float("nan"), 0, 1]),
        lambda pool: pool.logits(images, "sideways"),
        lambda pool: pool.logits(images[0]),
        lambda pool: pool.logits(torch.zeros(2, 3, 5, 7)),
        lambda pool: pool.logits(torch.full((2, 3, 16, 16), torch.nan)),
        lambda pool: pool.without("graz"),
    ):
        with pytest.raises(ms.MergestreamError) as wanted:
            call(vit_pool)
        with pytest.raises(type(wanted.value)) as found:
            call(host)
        assert str(found.value) == str(wanted.value)
    with pytest.raises(ms.MergestreamError, match="view"):
        host.logits_of_views(images, ("sideways",))
    with pytest.raises(IndexError):
        host.expert_logits(3, images)
    assert torch.equal(host.logits(images), vit_pool.logits(images))


# --- on a GPU -----------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_steps_on_a_gpu_are_the_cpus(pool: ms.ExpertPool, name: str, options: dict, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    pool = with_counts(pool)
    host, whole = HostPool.of(pool, "cuda"), pool.to("cuda", execution=ms.Execution(capture=False))
    cpu, gpu, streamed = (ms.create_method(name, each, **options) for each in (pool, whole, host))
    # Statistics of a few pictures divide by variances that are nearly nothing: rounding grows.
    close = 2e-2 if options.get("recalibrate_bn") else 1e-3
    for images in STREAM:
        one, two, three = cpu.step(images), gpu.step(images), streamed.step(images)
        assert three.logits.is_cuda
        for field in FIELDS:
            mine, theirs, found = (getattr(step, field) for step in (one, two, three))
            if mine is not None:
                torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(found.cpu(), mine, rtol=close, atol=close)


@pytest.mark.gpu
@needs_gpu
def test_one_hot_returns_the_row_bit_for_bit_on_a_gpu(pool: ms.ExpertPool) -> None:
    host = HostPool.of(pool, "cuda", torch.bfloat16)
    for k in range(len(host)):
        merged = host.merge([float(j == k) for j in range(len(host))])
        assert merged.is_cuda
        assert torch.equal(bits(merged.cpu()), bits(host.bank[k]))


# --- the benchmark ------------------------------------------------------------------------------------------


def test_the_benchmark_runs_and_keeps_what_it_measured(tmp_path: Path) -> None:
    small = ["img_size=16", "patch_size=8", "embed_dim=32", "depth=2", "num_heads=2"]
    command = [sys.executable, str(ROOT / "benchmarks" / "large_pool.py"), "--device", "cpu", "--experts", "8"]
    command += ["--network", "vit_tiny_patch16_224", "--batch", "2", "--steps", "3", "--limit-gib", "8"]
    command += [word for pair in small for word in ("--arg", pair)] + ["--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["experts"] for row in found["rows"]] == [1, 2, 4, 8]
    assert [row["rows_copied_per_step"] for row in found["rows"]] == [0, 0, 8, 16]
    for row in found["rows"]:
        assert row["ms_per_step"] > 0
        assert len(found["timings"][str(row["experts"])]) == 3
    assert {"commit", "command", "machine", "torch", "dtype", "limit_gib", "fit"} <= set(found)
    assert found["fit"]["over_experts"] == [4, 8]
    assert found["bank_gib"] == pytest.approx(8 * found["row_gib"])
