"""Where published tools are silently wrong, this one is not: one test for each."""

import pytest
import torch
from torch import Tensor, nn

import mergestream as ms
from conftest import CLASSES, HandWritten, make_base, make_experts, make_images, make_pool, micro_resnet, micro_vit

PREPROCESSING = ms.Preprocessing(size=(16, 16))
MERGES = [
    ("mean", {}),
    ("task_arithmetic", {}),
    ("ties", {}),
    ("adamerging", {}),
    ("fisher", {"statistics": "target"}),
    ("regmean", {"statistics": "target"}),
    ("regmean_pp", {"statistics": "target"}),
]


def build(factory, head: nn.Module | None = None) -> ms.ExpertPool:
    experts = make_experts(factory)
    return ms.ExpertPool.from_modules(
        experts, classes=CLASSES, base=make_base(factory), preprocessing=PREPROCESSING if factory != micro_vit else None
    )


@pytest.mark.parametrize("where", ["expert", "base"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_in_an_expert_or_the_base_is_refused_by_name(where: str, value: float) -> None:
    """All peers pass it through: a NaN in one weight of one model is in the merged model."""
    experts, base = make_experts(micro_vit), make_base(micro_vit)
    with torch.no_grad():
        (experts["brest"] if where == "expert" else base).blocks[1].mlp.fc1.weight[3, 4] = value
    with pytest.raises(ms.MergestreamError, match=r"('brest'|base).*blocks.1.mlp.fc1.weight.*NaN or Inf"):
        ms.ExpertPool.from_modules(experts, base=base)


def test_a_one_row_head_is_refused_and_not_broadcast() -> None:
    """PEFT, FusionBench's AdaMerging and a plain loop over state dicts broadcast it over all classes."""
    experts = {name: module.state_dict() for name, module in make_experts(micro_vit).items()}
    experts["brest"] = {**experts["brest"], "head.weight": experts["brest"]["head.weight"][:1]}
    plain = sum(state["head.weight"] for state in experts.values())
    assert plain.shape == (5, 32)  # the silent mistake
    with pytest.raises(ms.MergestreamError, match=r"'brest'.*'head.weight' has shape \(1, 32\)"):
        ms.ExpertPool.from_state_dicts(experts, micro_vit())
    base = {**make_base(micro_vit).state_dict(), "head.bias": torch.zeros(1)}
    with pytest.raises(ms.MergestreamError, match=r"base.*'head.bias' has shape \(1,\)"):
        ms.ExpertPool.from_state_dicts({"a": make_base(micro_vit).state_dict()}, micro_vit(), base=base)


@pytest.mark.parametrize("factory", [micro_vit, micro_resnet, HandWritten])
def test_one_hot_lambdas_give_the_expert_bit_for_bit(factory) -> None:
    """theta_0 + 1 * (theta_k - theta_0) rounds twice; written as a weighted sum it does not."""
    pool = build(factory)
    naive_differs = False
    for k in range(len(pool)):
        e_k = [float(j == k) for j in range(len(pool))]
        weights = ms.create_method("task_arithmetic", pool, **{"lambda": e_k}).merged_weights()
        for entry in pool.layout.parameters:
            span = slice(entry.start, entry.stop)
            assert torch.equal(weights[span], pool.bank[k, span])
            naive = pool.base[span] + (pool.bank[k, span] - pool.base[span])
            naive_differs = naive_differs or not torch.equal(naive, pool.bank[k, span])
    assert naive_differs


def test_lambda_1_over_k_is_the_mean_bit_for_bit() -> None:
    pool = build(micro_vit)
    arithmetic = ms.create_method("task_arithmetic", pool, **{"lambda": "1/K"}).merged_weights()
    assert torch.equal(arithmetic, ms.create_method("mean", pool).merged_weights())


class Counted(HandWritten):
    """With integer and boolean buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor([3, 7]))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, images: Tensor) -> Tensor:
        assert self.steps.dtype == torch.int64
        assert self.flags.dtype == torch.bool
        return super().forward(images)


@pytest.mark.parametrize(("name", "options"), [case for case in MERGES if case[0] != "regmean_pp"])
def test_integer_buffers_stay_integers(name: str, options: dict) -> None:
    """Peers crash on them, turn them into floats, or refuse the model. Here they take the maximum, in every method."""
    experts = make_experts(Counted)
    for k, module in enumerate(experts.values()):
        module.steps += k
        module.flags |= torch.tensor([False, k == 2])
    pool = ms.ExpertPool.from_modules(experts, classes=CLASSES, base=make_base(Counted), preprocessing=PREPROCESSING)
    method = ms.create_method(name, pool, **options)
    method.step(make_images(4))
    used = pool.module_with(method.merged_weights())
    assert torch.equal(used.steps, torch.tensor([5, 9]))
    assert torch.equal(used.flags, torch.tensor([True, True]))
    assert used.norm.num_batches_tracked.item() == 3


@pytest.mark.parametrize(("name", "options"), MERGES)
def test_batchnorm_statistics_are_averaged_whatever_is_done_to_the_parameters(name: str, options: dict) -> None:
    """TIES on a whole state dict trims running means and variances and shrinks what is left towards the base's."""
    pool = build(micro_resnet)
    method = ms.create_method(name, pool, **options)
    method.step(make_images(4))
    views = pool.layout.views(method.merged_weights())
    buffers = [entry.name for entry in pool.layout.entries if not entry.is_parameter]
    assert any("running_var" in buffer for buffer in buffers)
    for buffer in buffers:
        mean = torch.stack([pool.layout.views(row)[buffer] for row in pool.bank]).mean(dim=0)
        torch.testing.assert_close(views[buffer], mean)
    variances = torch.cat([views[buffer] for buffer in buffers if "running_var" in buffer])
    assert (variances > 0).all()


def test_ties_on_batchnorm_statistics_would_distort_them() -> None:
    """What the test above guards against is real: the published recipe moves variances away from all experts'."""
    from test_merging import naive_ties

    pool = build(micro_resnet)
    span = pool.layout.buffers
    distorted = naive_ties(pool.base[span], pool.bank[:, span], 0.2, "mean", 0.3)
    mean = pool.bank[:, span].mean(dim=0)
    assert (distorted - mean).abs().mean() > 0.5 * (pool.base[span] - mean).abs().mean()


def test_keeping_everything_is_allowed() -> None:
    """The published TIES crashes at a threshold of 100 % (a kthvalue of rank 0); here it is no trimming."""
    pool = build(micro_vit)
    assert torch.isfinite(ms.create_method("ties", pool, keep=1.0)(make_images(2))).all()


def test_a_singular_gram_is_no_obstacle() -> None:
    """One image, no ridge, no shrinking: the originals' inverse fails or explodes."""
    pool = ms.measure_statistics(make_pool("vit"), {n: make_images(1, seed=k) for k, n in enumerate(("lyon", "brest", "turin"))}, ["gram"])  # fmt: skip  # noqa: E501
    weights = ms.create_method("regmean", pool, ratio=1.0, ridge=0.0).merged_weights()
    assert torch.isfinite(weights).all()
    assert weights.abs().max() < 10 * pool.bank.abs().max()
