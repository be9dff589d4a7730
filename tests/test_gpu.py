"""The eager path on a CUDA device: the same answers as on the CPU. Run there with `pytest -m gpu`."""

import pytest
import torch

import mergestream as ms
from conftest import has_blocks, make_images, make_pool
from mergestream.methods import METHODS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CASES = [
    *((name, {"expert": "brest"} if name == "single_expert" else {}) for name in METHODS),
    *((name, {"statistics": "target"}) for name in ("fisher", "regmean", "regmean_pp")),
    ("fisher", {"fisher": "mergelm", "statistics": "target"}),
    ("adamerging", {"granularity": "layer"}),
    ("ties", {"trim_scope": "tensor", "merge": "max"}),
]


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


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
