"""Properties of the algebra, for any input that hypothesis can find."""

from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from mergestream.functional import coefficients, merging
from mergestream.functional import scores as scoring
from mergestream.functional.merging import weighted_sums
from mergestream.runtime.errors import MergestreamError


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_subnormal=False)


@st.composite
def logits(draw: st.DrawFn, scale: float = 50) -> Tensor:
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(2, 6)))
    return torch.from_numpy(draw(arrays.arrays("float32", shape, elements=floats(-scale, scale))))


scores = arrays.arrays("float32", st.integers(1, 8), elements=floats(0, 5)).map(torch.from_numpy)


@given(logits(), floats(0.125, 8))
def test_entropy_lies_between_zero_and_log_c(z: Tensor, tau: float) -> None:
    energy = scoring.entropy(z, tau)
    assert energy.dtype == torch.float32
    assert (energy >= -1e-6).all()
    assert (energy <= torch.tensor(float(z.shape[-1])).log() + 1e-5).all()


@given(logits(), floats(-20, 20))
def test_scores_ignore_a_shift_of_all_logits(z: Tensor, shift: float) -> None:
    # Not entropy_agreement: it counts equal predictions, and rounding can turn a near tie.
    for score in (scoring.entropy, scoring.max_softmax):
        torch.testing.assert_close(score(z, 1.0), score(z + shift, 1.0), rtol=1e-3, atol=1e-3)


def test_scores_of_certain_and_uncertain_experts_by_hand() -> None:
    """Three experts, two images, two classes; the third expert is alone with its answer to the first image."""
    log = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4], [0.3, 0.7]], [[0.2, 0.8], [0.4, 0.6]]]).log()
    entropy = torch.tensor([0.4127427, 0.6419380, 0.5867070])
    torch.testing.assert_close(scoring.entropy(log), entropy)
    torch.testing.assert_close(scoring.max_softmax(log), torch.tensor([0.15, 0.35, 0.3]))
    agreement = torch.tensor([0.75, 0.75, 0.5])  # with each other expert on 3 of 4, 3 of 4 and 2 of 4 answers
    torch.testing.assert_close(scoring.entropy_agreement(log), entropy / agreement**4)


@given(logits(scale=10), st.permutations(range(5)))
def test_scores_follow_the_experts_and_ignore_the_order_of_images(z: Tensor, order: list[int]) -> None:
    experts = [k for k in order if k < z.shape[0]]
    batch = [b for b in order if b < z.shape[1]]
    for score in scoring.SCORES.values():
        torch.testing.assert_close(score(z, 1.0)[experts], score(z[experts], 1.0))
        torch.testing.assert_close(score(z, 1.0), score(z[:, batch], 1.0), rtol=1e-4, atol=1e-6)


@given(logits())
def test_temperature_per_expert_equals_scaling_each_experts_logits(z: Tensor) -> None:
    taus = torch.linspace(0.5, 2, z.shape[0])
    torch.testing.assert_close(scoring.entropy(z, taus), scoring.entropy(z / taus[:, None, None], 1.0))


def test_extreme_logits_have_entropy_zero_not_nan() -> None:
    z = torch.tensor([[[1e30, -1e30, 0.0]], [[3e38, -3e38, 0.0]], [[0.0, 0.0, 0.0]]])
    energy = scoring.entropy(z)
    torch.testing.assert_close(energy, torch.tensor([0.0, 0.0, torch.tensor(3.0).log()]))
    assert torch.isfinite(coefficients.inverse(energy, 1e-6)).all()


@given(logits(scale=20), logits(scale=20))
def test_consistency_is_one_for_no_change_and_within_bounds(z: Tensor, other: Tensor) -> None:
    p = scoring.probabilities(z)
    torch.testing.assert_close(scoring.consistency(p, p[None]), torch.ones(len(z)))
    if other.shape == z.shape:
        c = scoring.consistency(p, scoring.probabilities(other)[None])
        assert ((c >= -1e-6) & (c <= 1 + 1e-6)).all()


def check_simplex(c: Tensor) -> None:
    assert c.dtype == torch.float32
    assert (c >= 0).all()
    assert float(c.sum()) == pytest.approx(1, abs=1e-5)


@given(scores, floats(0, 20))
def test_all_coefficients_lie_on_the_simplex(energy: Tensor, sharpness: float) -> None:
    star = coefficients.head_expert(energy, None, 1e-6)
    candidates = [
        coefficients.inverse(energy, 1e-6),
        coefficients.softmax(energy, sharpness),
        coefficients.entropy_gap(energy, star, sharpness),
        coefficients.select(energy, star),
        coefficients.uniform(len(energy)),
    ]
    for c in candidates:
        check_simplex(c)
        check_simplex(coefficients.smooth(coefficients.uniform(len(energy)), c, 0.3))


@given(scores)
def test_lower_score_never_weighs_less(energy: Tensor) -> None:
    order = energy.argsort()
    star = coefficients.head_expert(energy, None, 1e-6)
    for c in (coefficients.inverse(energy, 1e-6), coefficients.entropy_gap(energy, star, 2.0)):
        assert (c[order].diff() <= 1e-6).all()


@given(scores, st.randoms(use_true_random=False))
@example(torch.tensor([3.7e-27, 0.0]), Random(1))
def test_coefficients_are_equivariant_also_under_ties(energy: Tensor, random) -> None:
    order = list(range(len(energy)))
    random.shuffle(order)
    moved = energy[order]
    for rule in (coefficients.select, lambda e, s: coefficients.entropy_gap(e, s, 3.0)):
        one = rule(energy, coefficients.head_expert(energy, None, 1e-6))
        two = rule(moved, coefficients.head_expert(moved, None, 1e-6))
        torch.testing.assert_close(one[order], two)


@given(scores)
def test_select_is_the_limit_of_the_entropy_gap(energy: Tensor) -> None:
    energy = (energy * 100).round() / 100  # gaps of at least 0.01, or exact ties
    star = coefficients.head_expert(energy, None, 1e-6)
    sharp = coefficients.entropy_gap(energy, star, 1e4)
    torch.testing.assert_close(sharp, coefficients.select(energy, star), atol=1e-4, rtol=0)


@given(st.integers(2, 6))
def test_effective_number_of_experts(count: int) -> None:
    assert float(coefficients.effective_number(coefficients.uniform(count))) == pytest.approx(count, rel=1e-5)
    assert float(coefficients.effective_number(coefficients.one_hot(0, count))) == pytest.approx(1)


@pytest.mark.parametrize("bad", [[0.5, 0.6], [1.5, -0.5], [float("nan"), 1.0], [1.0], [[0.5, 0.5]]])
def test_coefficients_off_the_simplex_are_refused(bad: list) -> None:
    with pytest.raises(MergestreamError):
        coefficients.on_simplex(bad, 2)


@st.composite
def banks(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    k, p = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    bank = torch.from_numpy(draw(arrays.arrays("float32", (k, p), elements=floats(-100, 100))))
    raw = torch.from_numpy(draw(arrays.arrays("float32", k, elements=floats(0.0078125, 1))))
    return bank, raw / raw.sum()


@given(banks())
def test_weighted_sum_is_a_matrix_product(case: tuple[Tensor, Tensor]) -> None:
    bank, c = case
    exact = (c.double()[:, None] * bank.double()).sum(dim=0)
    for routine in (weighted_sums.weighted_sum, weighted_sums._sum_on_device):
        torch.testing.assert_close(routine(bank, c, torch.empty(bank.shape[1])).double(), exact, rtol=1e-5, atol=1e-4)


@given(banks(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
@settings(max_examples=60)
def test_one_hot_returns_the_row_bit_for_bit_in_every_type(case: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    bank = case[0].to(dtype)
    bank[:, 0] = -0.0
    for k in range(len(bank)):
        for routine in (weighted_sums.weighted_sum, weighted_sums._sum_on_device):
            out = torch.empty(bank.shape[1], dtype=dtype)
            routine(bank, coefficients.one_hot(k, len(bank)), out)
            assert torch.equal(out.view(torch.uint8), bank[k].contiguous().view(torch.uint8))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, c = torch.randn(3, 1000), torch.tensor([0.2, 0.3, 0.5])
    whole = merging.weighted_sum(bank, c, torch.empty(1000))
    monkeypatch.setattr(weighted_sums, "CHUNK", 7)
    assert torch.equal(merging.weighted_sum(bank, c, torch.empty(1000)), whole)


@given(banks(), floats(0, 0.9375))
def test_smoothing_coefficients_smooths_weights(case: tuple[Tensor, Tensor], mu: float) -> None:
    bank, c = case
    start = coefficients.uniform(len(bank))
    merged = [merging.weighted_sum(bank, x, torch.empty(bank.shape[1])) for x in (start, c)]
    smoothed = merging.weighted_sum(bank, coefficients.smooth(start, c, mu), torch.empty(bank.shape[1]))
    torch.testing.assert_close(smoothed, mu * merged[0] + (1 - mu) * merged[1], rtol=1e-4, atol=1e-3)
