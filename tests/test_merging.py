"""The arithmetic of TIES, Fisher, RegMean and unseen head rows, against naive references and by properties."""

import importlib

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from mergestream.functional.merging import Part, Rows, fisher_average, ties
from mergestream.functional.merging.regmean import regression_mean
from mergestream.functional.merging.ties import kth_smallest
from mergestream.functional.merging.weighted_sums import fill_unseen


def naive_ties(base: Tensor, experts: Tensor, keep: float, merge: str, scale: float) -> Tensor:
    """The published notebook, line by line, with f >= 1 defined as no trimming."""
    task = experts - base
    size = task.shape[1]
    drop = size - int(keep * size)
    if drop and keep < 1:
        bound = task.abs().sort(dim=1).values[:, drop - 1 : drop]
        task = task * (task.abs() >= bound)
    sign = torch.sign(task.sum(dim=0))
    sign[sign == 0] = torch.sign(sign.sum())
    agreeing = task * torch.where(sign[None] > 0, task > 0, task < 0)
    if merge == "mean":
        merged = agreeing.sum(dim=0) / (agreeing != 0).sum(dim=0).clamp(min=1)
    elif merge == "sum":
        merged = agreeing.sum(dim=0)
    else:
        merged = agreeing.abs().max(dim=0).values * sign
    return base + scale * merged


def whole(experts: Tensor) -> tuple[Rows, list[Part]]:
    """All numbers one part, the last of them the head."""
    size = experts.shape[1]
    return Rows.of(experts, size - 1), [Part(((0, size - 1), (size - 1, size)), size)]


# Small whole numbers tie, cancel and vanish all the time, which random floats never do.
numbers = st.integers(-3, 3).map(float)


@st.composite
def task_vectors(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    experts, size = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    base = draw(st.lists(numbers, min_size=size, max_size=size))
    rows = draw(st.lists(st.lists(numbers, min_size=size, max_size=size), min_size=experts, max_size=experts))
    return torch.tensor(base), torch.tensor(rows)


@given(task_vectors(), st.sampled_from([0.05, 0.2, 0.5, 0.9, 1.0]), st.sampled_from(["mean", "sum", "max"]))
@example((torch.zeros(2), torch.tensor([[1.0, -2.0], [-1.0, -1.0]])), 1.0, "mean")  # a cancellation, majority negative
@example((torch.zeros(2), torch.tensor([[1.0, 2.0], [-1.0, 1.0]])), 1.0, "sum")  # the same, positive
@example((torch.zeros(3), torch.tensor([[1.0, 2.0, -2.0], [-1.0, 1.0, -1.0]])), 1.0, "max")  # no majority
@settings(max_examples=100)
def test_ties_is_the_published_algorithm(case: tuple[Tensor, Tensor], keep: float, merge: str) -> None:
    base, experts = case
    rows, parts = whole(experts)
    ours = ties(base, rows, parts, keep=keep, merge=merge, scale=0.5, out=torch.empty_like(base))
    torch.testing.assert_close(ours, naive_ties(base, experts, keep, merge, 0.5), rtol=1e-6, atol=1e-6)


def test_ties_over_many_chunks_with_padding_is_ties_over_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    base, experts = torch.randn(1000), torch.randn(3, 1000)
    base[600:640], experts[:, 600:640] = 0, 0  # padding between encoder and head
    rows, parts = Rows.of(experts, 640), [Part(((0, 640), (640, 1000)), 960)]
    real = torch.cat([torch.arange(600), torch.arange(640, 1000)])
    expected = naive_ties(base[real], experts[:, real], 0.2, "mean", 0.3)
    for size in (1 << 19, 17):
        monkeypatch.setattr(importlib.import_module("mergestream.functional.merging.ties"), "CHUNK", size)
        ours = ties(base, rows, parts, keep=0.2, merge="mean", scale=0.3, out=torch.empty_like(base))
        torch.testing.assert_close(ours[real], expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(ours[600:640], torch.zeros(40))


def test_ties_trims_parts_apart() -> None:
    torch.manual_seed(1)
    base, experts = torch.zeros(50), torch.randn(3, 50)
    experts[:, 30:] *= 100  # a head that moved far would take all of a global trim
    parts = [Part(((0, 30),), 30), Part(((30, 50),), 20)]
    ours = ties(base, Rows.of(experts, 30), parts, keep=0.2, merge="sum", scale=1.0, out=torch.empty(50))
    expected = [naive_ties(base[a:b], experts[:, a:b], 0.2, "sum", 1.0) for a, b in ((0, 30), (30, 50))]
    torch.testing.assert_close(ours, torch.cat(expected))
    together = ties(base, *whole(experts), keep=0.2, merge="sum", scale=1.0, out=torch.empty(50))
    assert not together[:30].any()
    assert ours[:30].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_ties_computes_in_at_least_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    base, experts = torch.randn(200).to(dtype), torch.randn(3, 200).to(dtype)
    ours = ties(base, *whole(experts), keep=0.3, merge="mean", scale=0.3, out=torch.empty_like(base))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = naive_ties(base.to(wide), experts.to(wide), 0.3, "mean", 0.3).to(dtype)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0 if dtype == torch.bfloat16 else 1e-15)


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.5, 1.0, 1.5, 2.0, 7.25, 3e38]), min_size=1, max_size=60),
    st.data(),
    st.integers(1, 9),
)
def test_kth_smallest_is_that_of_a_sort(values: list[float], data: st.DataObject, size: int) -> None:
    numbers = torch.tensor(values)
    k = data.draw(st.integers(1, len(values)))
    sample = numbers[:: data.draw(st.integers(1, 20))]
    smallest = kth_smallest(lambda: iter(numbers.split(size)), sample, len(values), k)
    assert smallest == numbers.sort().values[k - 1].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("order", ["random", "sorted", "misled"])
def test_kth_smallest_of_many(order: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    numbers = torch.randn(200_000, dtype=dtype).abs()
    numbers = numbers.sort().values if order == "sorted" else numbers
    sample = torch.full((100,), 99.0, dtype=dtype) if order == "misled" else numbers[::50]
    for k in (1, 2, 1000, 160_000, 199_999, 200_000):
        smallest = kth_smallest(lambda: iter(numbers.split(4096)), sample, len(numbers), k)
        assert smallest == numbers.kthvalue(k).values.item()


def test_kth_smallest_refuses_a_rank_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="between 1 and 3"):
        kth_smallest(lambda: iter([torch.ones(3)]), torch.ones(3), 3, 4)


def test_fisher_average_weighs_every_number() -> None:
    torch.manual_seed(4)
    experts, information = torch.randn(3, 40), [torch.rand(40) for _ in range(3)]
    for each in information:
        each[5:9] = 0
    rows, scales = Rows.of(experts, 30), [0.5, 2.0, 1.0]
    plain = fisher_average(rows, information, scales, floor=1e-6, added=False, out=torch.empty(40))
    weights = torch.stack([(f * s).clamp(min=1e-6) for f, s in zip(information, scales, strict=True)]).double()
    torch.testing.assert_close(plain.double(), (weights * experts).sum(0) / weights.sum(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain[5:9], experts[:, 5:9].mean(dim=0))
    published = fisher_average(rows, information, scales, floor=1e-6, added=True, out=torch.empty(40))
    weights = torch.stack([(f + 1e-6) * s for f, s in zip(information, scales, strict=True)]).double()
    torch.testing.assert_close(published.double(), (weights * experts).sum(0) / weights.sum(0), rtol=1e-5, atol=1e-6)


def test_fisher_average_survives_tiny_and_huge_information() -> None:
    experts = torch.tensor([[1.0, 1.0], [3.0, 3.0]])
    rows = Rows.of(experts, 1)
    tiny = [torch.tensor([1e-38, 1e-38]), torch.tensor([3e-38, 3e-38])]
    out = fisher_average(rows, tiny, [1.0, 1.0], floor=1e-45, added=False, out=torch.empty(2))
    torch.testing.assert_close(out, torch.tensor([2.5, 2.5]))
    huge = [torch.tensor([1e38, 1e38]), torch.tensor([1e38, 1e38])]
    out = fisher_average(rows, huge, [1.0, 1.0], floor=1e-6, added=False, out=torch.empty(2))
    torch.testing.assert_close(out, torch.tensor([2.0, 2.0]))


def regression_case(experts: int, rows: int, inputs: int, outputs: int, seed: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(rows, inputs, generator=generator, dtype=torch.float64) for _ in range(experts)]
    return x, torch.randn(experts, outputs, inputs, generator=generator, dtype=torch.float64)


def grams_of(x: list[Tensor]) -> Tensor:
    return torch.stack([each.T @ each / len(each) for each in x])[:, None]


@given(st.integers(1, 4), st.integers(6, 20), st.integers(1, 6), st.integers(1, 4), st.integers(0, 1000))
def test_regmean_minimises_the_distance_to_all_experts(k: int, n: int, d: int, o: int, seed: int) -> None:
    x, weights = regression_case(k, n, d, o, seed)
    ours = regression_mean(weights[:, None], grams_of(x), ratio=1.0, ridge=0.0)[0]
    design = torch.cat([each / len(each) ** 0.5 for each in x])
    answers = torch.cat([each @ w.T / len(each) ** 0.5 for each, w in zip(x, weights, strict=True)])
    expected = torch.linalg.lstsq(design, answers).solution.T
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_regmean_with_ratio_and_ridge_is_its_formula() -> None:
    x, weights = regression_case(3, 30, 5, 4, 0)
    grams = grams_of(x)
    shrunk = [0.9 * g[0] + 0.1 * torch.diag(g[0].diag()) + 0.01 * torch.eye(5) for g in grams]
    right = sum(g @ w.T for g, w in zip(shrunk, weights, strict=True))
    expected = torch.linalg.solve(sum(shrunk), right).T
    ours = regression_mean(weights[:, None], grams, ratio=0.9, ridge=0.01)[0]
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_regmean_of_singular_grams_keeps_the_mean_where_no_input_reaches(dtype: torch.dtype) -> None:
    """Fewer rows than inputs, and inputs that are always zero: the inverse of the originals does not exist."""
    x, weights = regression_case(3, 2, 10, 4, 1)
    for each in x:
        each[:, 7] = 0
    grams = grams_of(x)
    ours = regression_mean(weights[:, None].to(dtype), grams.to(dtype), ratio=1.0, ridge=0.0)[0].double()
    assert torch.isfinite(ours).all()
    reached = torch.cat(x)
    unreached = torch.linalg.svd(reached).Vh[len(reached) :]
    assert len(unreached) == 4
    torch.testing.assert_close(ours @ unreached.T, weights.mean(dim=0) @ unreached.T, rtol=1e-3, atol=1e-3)
    left, right = grams[:, 0].sum(0), sum(g[0] @ w.T for g, w in zip(grams, weights, strict=True))
    torch.testing.assert_close(left @ ours.T, right, rtol=1e-3, atol=1e-3)


def test_a_singular_gram_loses_no_input_that_is_merely_small() -> None:
    """Two inputs that are always equal make it singular; others are a million times smaller and still count."""
    x, weights = regression_case(3, 40, 6, 4, 3)
    for each in x:
        each[:, 1] = each[:, 0]
        each[:, 2:] *= 1e-5
        each *= 1000
    grams = grams_of(x)
    ours = regression_mean(weights[:, None], grams, ratio=1.0, ridge=0.0)[0]
    left, right = grams[:, 0].sum(0), sum(g[0] @ w.T for g, w in zip(grams, weights, strict=True))
    scale = left.diagonal().sqrt()
    torch.testing.assert_close((left @ ours.T) / scale[:, None], right / scale[:, None], rtol=1e-6, atol=1e-6)
    apart = torch.tensor([1.0, -1, 0, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(ours @ apart, weights.mean(dim=0) @ apart, rtol=1e-6, atol=1e-6)


def test_regmean_does_not_mistake_small_inputs_for_absent_ones() -> None:
    x, weights = regression_case(3, 40, 6, 4, 2)
    scale = torch.logspace(-5, 4, 6, dtype=torch.float64)
    grams = grams_of([each * scale for each in x])
    ours = regression_mean(weights[:, None], grams, ratio=1.0, ridge=0.0)[0]
    # With W' = W diag(scale) it is the well-scaled problem.
    expected = regression_mean(weights[:, None] * scale, grams_of(x), ratio=1.0, ridge=0.0)[0] / scale
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


@given(st.integers(0, 500), st.integers(1, 4), st.integers(1, 4))
def test_unseen_rows_do_not_count_in_any_average(seed: int, experts: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(experts, classes * 3, generator=generator)
    seen = torch.rand(experts, classes, generator=generator) < 0.6
    shares = torch.rand(experts, generator=generator) + 0.1
    shares = shares / shares.sum()
    spans = [(slice(c * 3, c * 3 + 3), c) for c in range(classes)]
    before = head.clone()
    filled = fill_unseen(head, spans, seen, shares)
    assert torch.equal(head, before)
    for span, c in spans:
        who = seen[:, c] if bool(seen[:, c].any()) else torch.ones(experts, dtype=torch.bool)
        own = shares * who
        expected = (own[:, None] * head[:, span]).sum(dim=0) / own.sum()
        torch.testing.assert_close(shares @ filled[:, span], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(filled[who, span], head[who, span])


def test_unseen_rows_with_no_weight_on_those_who_saw_it() -> None:
    head, seen = torch.tensor([[1.0], [5.0], [9.0]]), torch.tensor([[False], [True], [True]])
    filled = fill_unseen(head, [(slice(0, 1), 0)], seen, torch.tensor([1.0, 0.0, 0.0]))
    assert filled.flatten().tolist() == [7.0, 5.0, 9.0]
