"""The eager path on a CUDA device: the same answers as on the CPU. Run there with `pytest -m gpu`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mergestream as ms
from conftest import has_blocks, make_images, make_pool
from mergestream.data.datasets import phantom
from mergestream.methods import METHODS
from mergestream.runtime.state_file import SavedState
from mergestream.training import Fit, Recipe, fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32"),
]
CASES = [
    *((name, {"expert": "brest"} if name == "single_expert" else {}) for name in METHODS),
    *((name, {"statistics": "target"}) for name in ("fisher", "regmean", "regmean_pp")),
    ("fisher", {"fisher": "mergelm", "statistics": "target"}),
    ("adamerging", {"granularity": "layer"}),
    ("ties", {"trim_scope": "tensor", "merge": "max"}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}-{'-'.join(o.values())}" for n, o in CASES])
def test_steps_equal_the_cpus(pool: ms.ExpertPool, name: str, options: dict) -> None:
    if name == "regmean_pp" and not has_blocks(pool):
        pytest.skip("regmean_pp refuses networks without known blocks")
    here = ms.create_method(name, pool, **options)
    there = ms.create_method(name, pool.to("cuda"), **options)
    for seed, count in enumerate((6, 3, 1)):
        images = make_images(count, seed=seed)
        one, two = here.step(images), there.step(images)
        assert two.logits.is_cuda
        # Solving nearly singular systems magnifies how differently both devices round.
        tolerance = 1e-2 if name.startswith("regmean") else 1e-3
        torch.testing.assert_close(one.logits, two.logits.cpu(), rtol=tolerance, atol=tolerance)
        for field in ("encoder_coefficients", "head_coefficients", "entropy", "consistency", "lambdas"):
            mine, theirs = getattr(one, field), getattr(two, field)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs.cpu(), rtol=1e-3, atol=1e-4)
        assert one.head_expert == two.head_expert


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_hot_returns_the_row_bit_for_bit(pool: ms.ExpertPool, dtype: torch.dtype) -> None:
    there = pool.to("cuda", dtype=dtype)
    for k in range(len(there)):
        weights = there.merge([float(j == k) for j in range(len(there))])
        assert torch.equal(weights.view(torch.uint8), there.bank[k].view(torch.uint8))


def test_the_pool_survives_the_trip(pool: ms.ExpertPool) -> None:
    assert pool.to("cuda").to("cpu").fingerprint() == pool.fingerprint()
    assert pool.to("cuda").fingerprint() == pool.fingerprint()


def test_state_travels_between_devices() -> None:
    pool = make_pool("vit")
    method = ms.create_method("entropy_adaptive", pool, momentum=0.5)
    method.step(make_images())
    there = ms.create_method("entropy_adaptive", pool.to("cuda"), momentum=0.5)
    there.load_state_dict(method.state_dict())
    torch.testing.assert_close(there(make_images(seed=3)).cpu(), method(make_images(seed=3)), rtol=1e-3, atol=1e-3)


RECIPE = Recipe(steps=12, batch_size=16, learning_rate=1e-3, validate_every=4, dropout=0.2, accelerator="cuda")


def phantom_fit(recipe: Recipe, **more) -> Fit:
    from mergestream.networks.architecture import create_network

    torch.manual_seed(0)
    micro = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
    network = create_network("vit_tiny_patch16_224", num_classes=len(phantom.CLASSES), **micro)
    return fit(network, ms.load_dataset("phantom", images=120)["lyon"], recipe, **more)


@pytest.mark.parametrize("optimiser", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_captured_step_learns_what_an_eager_one_learns(optimiser: str, precision: str) -> None:
    """The same draws of augmentation, flips and dropout, and the same sums."""
    recipe = replace(RECIPE, optimiser=optimiser, precision=precision, loss="weighted", schedule="cosine")
    eager, graph = phantom_fit(replace(recipe, compile="never")), phantom_fit(recipe)
    assert (eager.execution, graph.execution) == ("eager", "graph")
    tolerance = 1e-3 if precision == "32-true" else 3e-2
    for one, two in zip(eager.history, graph.history, strict=True):
        assert two == pytest.approx(one, rel=tolerance, abs=tolerance)


def test_a_compiled_step_learns_what_an_eager_one_learns() -> None:
    recipe = replace(RECIPE, dropout=0.0)  # a compiled dropout draws in its own order
    eager, compiled = phantom_fit(replace(recipe, compile="never")), phantom_fit(replace(recipe, compile="always"))
    assert compiled.execution == "compiled graph"
    for one, two in zip(eager.history, compiled.history, strict=True):
        assert two == pytest.approx(one, rel=1e-2, abs=1e-2)


def test_a_captured_fit_goes_on_after_a_kill(tmp_path: Path) -> None:
    taken: list[int] = []

    def tick() -> None:
        taken.append(1)
        if len(taken) == 7:
            raise KeyboardInterrupt

    whole, checkpoint = phantom_fit(RECIPE), SavedState(tmp_path / "unfinished")
    with pytest.raises(KeyboardInterrupt):
        phantom_fit(RECIPE, on_step=tick, checkpoint=checkpoint)
    again = phantom_fit(RECIPE, on_step=lambda: taken.append(1), checkpoint=checkpoint)
    assert len(taken) == 7 + 12 - 4
    assert again.execution == "graph"
    for one, two in zip(whole.history, again.history, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("change", [{"schedule": "one_cycle"}, {"precision": "16-mixed"}])
def test_what_a_graph_cannot_hold_is_stepped_eagerly(change: dict) -> None:
    fitted = phantom_fit(replace(RECIPE, **change))
    assert fitted.execution == "eager"
    assert fitted.history[-1]["validation_loss"] < fitted.history[0]["validation_loss"] * 1.5
    with pytest.raises(ms.MergestreamError, match="another schedule than"):
        phantom_fit(replace(RECIPE, **change, compile="always"))
