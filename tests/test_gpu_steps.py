"""Captured steps on a CUDA device against eager ones. Run there with `pytest -m gpu`."""

import gc
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import mergestream as ms
from conftest import make_images, make_pool
from kernel_checks import MIXES, assert_pixels_are_looked_up, assert_the_mix_kernel_corrects_as_the_reference
from mergestream.data.datasets import DataRequest
from mergestream.functional.merging import weighted_sums
from mergestream.pool.execution import Execution
from mergestream.pool.fused_blocks import fused_blocks, fused_first_token, fused_forward
from mergestream.runtime.errors import InputError
from mergestream.runtime.parallel import quiet
from mergestream.training import Recipe
from mergestream.training.recipe import TrainPlan
from mergestream.training.training_run import run_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32"),
]
SMALL = (("depth", 4), ("embed_dim", 96), ("img_size", 32), ("num_heads", 3), ("patch_size", 8))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[ms.ExpertPool, Tensor]:
    """Experts that were trained, and images of a site that none of them saw."""
    folder: Path = tmp_path_factory.mktemp("trained")
    recipe = Recipe(steps=1500, batch_size=32, learning_rate=1e-3, validate_every=100, accelerator="cuda")
    plan = TrainPlan(DataRequest("phantom", None), "vit_tiny_patch16_224", (recipe,), SMALL, init="random")
    run_training(plan, folder / "pool", quiet)
    pool = ms.ExpertPool.load(folder / "pool")
    target = pool.names[0]
    data = ms.load_dataset("phantom")[target]
    # Class after class, so that experts differ in how certain they are of a batch.
    return pool.without(target), data.batch(data.labels.argsort(stable=True))


def steps_of(pool: ms.ExpertPool, batches: list[Tensor]) -> tuple[Tensor, Tensor, list[bool]]:
    """Predictions [N], coefficients [T,2,K] and whether the choice of the head expert was nearly tied, by batch."""
    method = ms.create_method("entropy_adaptive", pool)
    predictions, coefficients, tied = [], [], []
    for batch in batches:
        step = method.step(batch)
        predictions.append(step.logits.argmax(dim=-1).cpu())
        coefficients.append(torch.stack([step.encoder_coefficients, step.head_coefficients]).cpu())
        evidence = (1 + step.consistency) / (step.entropy + 1e-6)
        first, second = evidence.topk(2).values.tolist()
        tied.append(first / second < 1.02)
    method.settle()
    return torch.cat(predictions), torch.stack(coefficients), tied


@pytest.mark.parametrize(
    ("dtype", "same", "close"),
    [
        (torch.float32, 0.999, 1e-4),
        (torch.bfloat16, 0.99, 1e-2),
    ],
    ids=str,
)
def test_fast_steps_agree_with_eager_float32(
    trained: tuple[ms.ExpertPool, Tensor],
    dtype: torch.dtype,
    same: float,
    close: float,
    record_property: Any,
) -> None:
    pool, images = trained
    batches = list(images.cuda().split(32))
    reference = steps_of(pool.to("cuda", execution=Execution(capture=False)), batches)
    fast = steps_of(pool.to("cuda", dtype=dtype), batches)
    spread = reference[1].amax(dim=-1) - reference[1].amin(dim=-1)
    assert spread[:, 0].max() > 0.1, f"the experts' coefficients hardly differ: {spread[:, 0].max():.3f}"
    agreement = float((reference[0] == fast[0]).float().mean())
    clear = [number for number, tied in enumerate(reference[2]) if not tied]
    difference = float((reference[1] - fast[1])[clear].abs().max())
    properties = {"alike": agreement, "difference": difference, "nearly_tied": reference[2].count(True)}
    for name, value in properties.items():
        record_property(name, value)
    assert agreement >= same
    assert difference <= close


def test_a_hundred_steps_never_wait_for_the_device(trained: tuple[ms.ExpertPool, Tensor]) -> None:
    pool, images = trained
    method = ms.create_method("entropy_adaptive", pool.to("cuda"), momentum=0.5, refresh_every=3)
    batches = images.cuda()[: 32 * 10].split(32)
    for batch in batches:
        method.step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(100):
            method.step(batches[number % len(batches)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    method.settle()
    assert method.graphs is not None


def test_a_batch_that_is_not_finite_is_refused_late_and_leaves_no_trace() -> None:
    pool = make_pool("vit").to("cuda")
    method = ms.create_method("entropy_adaptive", pool, momentum=0.5)
    good = [pool.prepare(make_images(4, seed=seed)) for seed in range(4)]
    for images in good:
        method.step(images)
    method.settle()
    before = method.state_dict()["state"]
    bad = good[0].clone()
    bad[2] = torch.nan
    method.step(bad)
    with pytest.raises(InputError, match="image 2 of this batch"):
        method.settle()
    after = method.state_dict()["state"]
    assert all(torch.equal(after[key], before[key]) for key in ("encoder", "head"))
    assert after["batches"] == before["batches"]


def test_pools_come_and_go_and_each_is_captured() -> None:
    """When the last graph is gone, so is its memory: the next one must find some."""
    for seed in range(3):
        pool = make_pool("vit").to("cuda")
        method = ms.create_method("entropy_adaptive", pool)
        for _ in range(3):
            method.step(make_images(4, seed=seed))
        method.settle()
        assert method.graphs is not None
        assert method.graphs.recorded
        del method, pool
        gc.collect()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("network", ["vit_tiny_patch16_224", "vit_base_patch32_224"])
def test_fused_blocks_answer_as_float32_does(network: str, dtype: torch.dtype) -> None:
    """No further from float32 than timm's own blocks in the same type, but for a little."""
    torch.manual_seed(0)
    module = timm.create_model(network, num_classes=5).cuda().eval()
    images = torch.randn(8, 3, 224, 224, device="cuda")
    with torch.inference_mode():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        exact = module(images)
        half = module.to(dtype)
        plain = half(images.to(dtype)).float()
        with fused_blocks([half]):
            assert all(block.forward.__func__ is fused_forward for block in half.blocks[:-1])
            assert half.blocks[-1].forward.__func__ is fused_first_token
            fused = half(images.to(dtype)).float()
    scale = exact.std()
    assert (fused - exact).abs().max() / scale < 2 * (plain - exact).abs().max() / scale + 0.02


@pytest.mark.parametrize("size", [*MIXES, (32, 0, 7, 2, 0.3), (32, 5, 7, 1, 0.0), (64, 1, 8, 2, 0.3)], ids=str)
def test_the_mix_kernel_corrects_as_the_reference_does(size: tuple[int, int, int, int, float]) -> None:
    assert_the_mix_kernel_corrects_as_the_reference(*size, device="cuda", steps=12)


@pytest.mark.parametrize("size", [(1, 5, 3), (32, 224, 224), (7, 126, 127)], ids=str)
def test_pixels_are_looked_up_as_they_are_computed(size: tuple[int, int, int]) -> None:
    assert_pixels_are_looked_up(*size, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 3, 20])
def test_the_fused_merge_is_the_sum(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator("cuda").manual_seed(count)
    bank = torch.randn(count, 1_000_064, device="cuda", generator=generator).to(dtype)
    rows, shares = bank[:, :1_000_001], torch.softmax(torch.randn(count, device="cuda", generator=generator), dim=0)
    out = torch.full((1_000_001,), torch.nan, device="cuda", dtype=dtype)
    assert weighted_sums.kernel_can_run(rows, out)
    weighted_sums.kernel_sum(rows, shares, out)
    expected = (rows.double() * shares.double()[:, None]).sum(dim=0)
    torch.testing.assert_close(
        out.double(),
        expected.to(dtype).double(),
        rtol=1e-2 if dtype != torch.float32 else 1e-5,
        atol=1e-2 if dtype != torch.float32 else 1e-6,
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            (name, {})
            for name in ("ensemble", "mean", "select_expert", "task_arithmetic", "merge_and_fit", "corrected")
        ),
        ("single_expert", {"expert": "brest"}),
        ("entropy_adaptive", {"score_images": 2}),
        ("merge_and_fit", {"ask_first": 6, "ask_every": 2}),
        ("merge_once", {"ask_first": 6, "ask_drift": 0.5}),
        ("merge_and_fit", {"batch_bias": 0.0}),
    ],
    ids=str,
)
def test_other_methods_are_captured_too(name: str, options: dict) -> None:
    pool = make_pool("vit", base=True).to("cuda")
    fast = ms.create_method(name, pool, **options)
    slow = ms.create_method(name, pool.to(execution=Execution(capture=False)), **options)
    for seed, size in enumerate((6, 6, 6, 2, 5, 6)):
        one, two = fast.step(make_images(size, seed=seed)), slow.step(make_images(size, seed=seed))
        torch.testing.assert_close(one.logits, two.logits, rtol=1e-3, atol=1e-3)
    assert fast.graphs is not None
