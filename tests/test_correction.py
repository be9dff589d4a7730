"""The correction for class mixes: exact small cases, and soft, calibrated, simulated answers whose truth is known."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mergestream as ms
from conftest import CLASSES, make_images, make_pool
from mergestream.functional import neighbours
from mergestream.methods.correction import (
    Correction,
    CorrectionState,
    LongRun,
    LongRunState,
)
from mergestream.methods.fading_window import FadingWindow
from mergestream.pool.runner import Batch

RARE = torch.tensor([0.84, 0.16])
SEVEN = torch.full((7,), 1 / 7)
sizes = {"images": st.integers(1, 6), "classes": st.integers(2, 4), "seed": st.integers(0, 2**16)}


def mix(classes: int, seed: int) -> Tensor:
    return torch.softmax(torch.randn(classes, generator=torch.Generator().manual_seed(seed)), dim=0)


def soft(images: int, classes: int, seed: int) -> Tensor:
    return torch.softmax(2 * torch.randn(images, classes, generator=torch.Generator().manual_seed(seed)), dim=1)


# --- the batch --------------------------------------------------------------------------------------------------------


def by_enumeration(answers: Tensor, assumed: Tensor, expected: Tensor, concentration: float) -> Tensor:
    """Posteriors of all labels, summed over every combination of labels under a Polya urn."""
    images, classes = answers.shape
    totals = torch.zeros(images, classes, dtype=torch.float64)
    for labels in itertools.product(range(classes), repeat=images):
        weight, counts = 1.0, [0] * classes
        for number, label in enumerate(labels):
            weight *= (concentration * float(expected[label]) + counts[label]) / (concentration + number)
            weight *= float(answers[number, label] / assumed[label])
            counts[label] += 1
        for number, label in enumerate(labels):
            totals[number, label] += weight
    return (totals / totals.sum(dim=1, keepdim=True)).float()


def in_batch(
    answers: Tensor, assumed: Tensor, expected: Tensor, concentration: float, present: Tensor | None = None
) -> Tensor:
    """One set of answers [B,C]."""
    present = torch.ones(len(answers)) if present is None else present
    strength = torch.tensor(concentration)
    return neighbours.answers_in_batch(answers[None], assumed[None], expected[None], strength, present)[0]


@given(classes=st.integers(2, 5), seed=st.integers(0, 2**16), concentration=st.floats(0.1, 50))
def test_two_images_inform_each_other_exactly(classes: int, seed: int, concentration: float) -> None:
    answers, assumed, expected = soft(2, classes, seed), mix(classes, seed), mix(classes, seed + 1)
    own = in_batch(answers, assumed, expected, concentration)
    exact = by_enumeration(answers, assumed, expected, concentration)
    torch.testing.assert_close(own, exact, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("concentration", [0.3, 2.0, 20.0])
def test_larger_batches_are_near_the_exact_answers(concentration: float) -> None:
    errors, plain = [], []
    for seed in range(12):
        answers, assumed = soft(5, 3, seed), mix(3, seed)
        exact = by_enumeration(answers, assumed, assumed, concentration)
        own = in_batch(answers, assumed, assumed, concentration)
        errors.append(float((own - exact).abs().mean()))
        plain.append(float((answers - exact).abs().mean()))
    assert np.mean(errors) < 0.25 * np.mean(plain)


@given(**sizes)
def test_order_and_padding_change_nothing(images: int, classes: int, seed: int) -> None:
    answers, assumed, expected = soft(images, classes, seed), mix(classes, seed), mix(classes, seed + 1)
    own = in_batch(answers, assumed, expected, 0.7)
    torch.testing.assert_close(own.sum(dim=1), torch.ones(images))
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    turned = in_batch(answers[order], assumed, expected, 0.7)
    torch.testing.assert_close(turned, own[order], rtol=1e-3, atol=1e-5)
    padded = torch.cat([answers, soft(2, classes, seed + 2)])
    present = torch.cat([torch.ones(images), torch.zeros(2)])
    longer = in_batch(padded, assumed, expected, 0.7, present)
    torch.testing.assert_close(longer[:images], own, rtol=1e-3, atol=1e-5)


@given(classes=st.integers(2, 5), seed=st.integers(0, 2**16))
def test_an_image_is_no_evidence_about_itself(classes: int, seed: int) -> None:
    answers, assumed, expected = soft(1, classes, seed), mix(classes, seed), mix(classes, seed + 1)
    own = in_batch(answers, assumed, expected, 0.01)
    joint = answers * expected / assumed
    torch.testing.assert_close(own, joint / joint.sum(), rtol=1e-4, atol=1e-6)


def test_a_correlation_is_believed_as_far_as_its_error_allows() -> None:
    def believed(estimate: float, error: float) -> tuple[float, float]:
        probable, rho = neighbours.correlation(torch.tensor(estimate), torch.tensor(error), 0.05)
        return float(probable), float(rho)

    assert believed(0.0, 10.0) == (pytest.approx(0.05, abs=0.001), pytest.approx(0.5, abs=0.01))  # nothing is known
    assert believed(0.0, 0.01)[0] < 0.01
    assert believed(-3.0, 0.01)[0] < 0.01  # batches more even than chance
    assert believed(0.5, 0.01) == (pytest.approx(1.0), pytest.approx(0.5, abs=0.01))
    assert believed(0.1, 0.1)[0] < 0.2  # one standard error
    assert believed(5.0, 0.1)[1] == pytest.approx(0.93, abs=0.03)


@pytest.mark.parametrize("batches", [3, 10, 100])
def test_independent_batches_are_rarely_believed_to_be_clumped(batches: int) -> None:
    """The sum of squares of few batches has a heavy tail; a normal error would take it for a correlation."""
    random, alarms = np.random.default_rng(0), 0
    for _ in range(300):
        squares = torch.tensor(random.chisquare(batches), dtype=torch.float32)
        freedom, ratio = torch.tensor(float(batches)), torch.tensor(10.0)
        alarms += float(neighbours.correlation_in_batches(squares, freedom, ratio, 0.05)[0]) > 0.5
    assert alarms / 300 < 0.02


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9])
def test_the_correlation_of_many_batches_is_recovered(rho: float) -> None:
    squares = torch.tensor(np.random.default_rng(1).chisquare(500) * (1 + 10 * rho), dtype=torch.float32)
    probable, estimate = neighbours.correlation_in_batches(squares, torch.tensor(500.0), torch.tensor(10.0), 0.05)
    assert float(probable) > 0.999
    assert float(estimate) == pytest.approx(rho, rel=0.2)


# --- simulated streams ------------------------------------------------------------------------------------------------


class Site:
    """Unit Gaussians, one mean per class; answers are exact posteriors for the mix at home, so they are calibrated."""

    def __init__(self, home: Tensor, distance: float, seed: int) -> None:
        self.home, self.random = home, np.random.default_rng(seed)
        self.means = distance * (np.eye(len(home)) - 1 / len(home))

    def labels(self, images: int, size: int, prevalence: Tensor, concentration: float | None = None) -> Tensor:
        """[batches, size], every batch with a mix of its own where a concentration is given."""
        shares, batches = prevalence.double().numpy(), images // size
        mixes = np.tile(shares / shares.sum(), (batches, 1))
        if concentration is not None:
            drawn = self.random.gamma(concentration * mixes) + 1e-300
            mixes = drawn / drawn.sum(axis=1, keepdims=True)
        return torch.tensor(np.array([self.random.choice(len(shares), size=size, p=each) for each in mixes]))

    def answers(self, labels: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        seen = self.means[labels.numpy()] + self.random.normal(size=(*labels.shape, len(self.home)))
        scores = seen @ self.means.T - 0.5 * (self.means**2).sum(axis=1)
        return torch.softmax(torch.tensor(scores, dtype=torch.float32) + self.home.log() + bias, dim=-1)


def corrected(
    answers: Tensor, home: Tensor, experts: Tensor | None = None, batch_bias: float = 0.3
) -> tuple[Tensor, CorrectionState]:
    """A whole stream [T,B,C]; experts [K,T,B,C]. Without experts the long run is trusted as it is."""
    anchor = 0.0 if experts is None else None
    unit = Correction(LongRun(home, torch.ones_like(home), anchor), batch_bias)
    state, out = unit.start(1 if experts is None else len(experts)), []
    for number, batch in enumerate(answers):
        own = None if experts is None else experts[:, number]
        (result,), _, state = unit.correct_all(state, batch, own, None, FadingWindow.of(Batch(batch), 4096))
        out.append(result)
    return torch.stack(out), state


def older(answers: Tensor, home: Tensor) -> Tensor:
    """The class prior of version 0.1 on a whole stream [T,B,C]: expectation-maximisation with a Dirichlet prior.

    Its concentration comes from the mean squared departure of batches, as if answers were certain.
    """
    counts, clumped, batches, out = torch.zeros_like(home), 0.0, 0.0, []
    for number, batch in enumerate(answers):
        mean, size = batch.mean(dim=0), len(batch)
        if number and size > 1:
            usual = counts / counts.sum()
            departure = float((mean - usual).square().sum() / (usual * (1 - usual)).sum())
            clumped, batches = clumped + (departure - 1 / size) / (1 - 1 / size), batches + 1
        counts = counts + size * mean
        assumed = (counts + 32 * home) / (counts + 32 * home).sum()
        strength = 1 / min(max((clumped + 4 / 101) / (batches + 4), 1e-4), 2 / 3) - 1
        mix = assumed
        for _ in range(10):
            joint = batch * mix / assumed
            mix = ((joint / joint.sum(dim=1, keepdim=True)).sum(dim=0) + strength * assumed) / (size + strength)
        joint = batch * mix / assumed
        out.append(joint / joint.sum(dim=1, keepdim=True))
    return torch.stack(out)


def accuracy(answers: Tensor, labels: Tensor) -> float:
    return 100 * float((answers.argmax(-1) == labels).float().mean())


def nll(answers: Tensor, labels: Tensor) -> float:
    return -float(answers.gather(-1, labels[..., None]).log().mean())


@pytest.mark.parametrize("distance", [1.0, 2.0])
@pytest.mark.parametrize("prevalence", [0.02, 0.1, 0.5])
def test_calibrated_answers_at_another_prevalence_are_left_alone(prevalence: float, distance: float) -> None:
    """Home has 16 % positives. Nothing is clumped, so there is nothing to gain, and nothing may be lost."""
    points, nats = [], []
    for seed in range(3):
        site = Site(RARE, distance, seed)
        labels = site.labels(3200, 32, torch.tensor([1 - prevalence, prevalence]))
        plain = site.answers(labels)
        own, _ = corrected(plain, RARE)
        points.append(accuracy(own, labels) - accuracy(plain, labels))
        nats.append(nll(own, labels) - nll(plain, labels))
    assert np.mean(points) > -0.3
    assert np.mean(nats) < 0.01


@pytest.mark.parametrize(("home", "size"), [(RARE, 32), (RARE, 8), (SEVEN, 32), (SEVEN, 2)], ids=str)
def test_clumped_batches_gain_at_least_what_the_older_rule_gains(home: Tensor, size: int) -> None:
    site = Site(home, 2.0, 1)
    labels = site.labels(1600, size, home, 0.05 * len(home))
    plain = site.answers(labels)
    own, before = corrected(plain, home)[0], older(plain, home)
    assert accuracy(own, labels) >= accuracy(before, labels)
    assert nll(own, labels) < min(nll(before, labels), nll(plain, labels))


def assert_concentration_is_found(
    unit: Correction, concentration: float, size: int, distance: float, reliability: float
) -> None:
    """Within a factor of two, in answers of at least this reliability."""
    site, start = Site(SEVEN, distance, 2), unit.start(1)
    clump, spread = start.clump, start.spread
    for batch in site.answers(site.labels(8000, size, SEVEN, concentration)):
        window = FadingWindow.of(Batch(batch), 1e6)
        clump = clump.add(batch, window)
        spread = spread.add(batch, SEVEN, torch.tensor(1.0), window)
    variance = spread.variance()
    assert reliability < float(neighbours.reliability(variance, SEVEN)) < 0.9
    probable, rho = clump.correlation(variance, SEVEN, unit.variance_of_bias(variance, SEVEN))
    assert float(probable) > 0.9
    assert 0.5 < float(1 / rho - 1) / concentration < 2


@pytest.mark.parametrize("distance", [0.9, 1.5, 3.0])
@pytest.mark.parametrize("size", [2, 32, 128])
@pytest.mark.parametrize("concentration", [0.3, 3.0])
def test_the_concentration_is_found(concentration: float, size: int, distance: float) -> None:
    """In calibrated answers: with an allowance for biases of a batch, weak answers cannot show it."""
    unit = Correction(LongRun(SEVEN, torch.ones(7), 0.0), batch_bias=0.0)
    assert_concentration_is_found(unit, concentration, size, distance, 0.1)


@pytest.mark.parametrize("distance", [1.5, 3.0])
@pytest.mark.parametrize("size", [2, 32, 128])
@pytest.mark.parametrize("concentration", [0.3, 3.0])
def test_the_concentration_is_found_in_reliable_answers_by_default(
    concentration: float, size: int, distance: float
) -> None:
    unit = Correction(LongRun(SEVEN, torch.ones(7), 0.0))
    assert_concentration_is_found(unit, concentration, size, distance, 0.35)


@pytest.mark.parametrize(("distance", "size"), [(0.8, 8), (0.8, 32), (1.2, 32)])
def test_a_bias_of_a_batch_is_no_skew(distance: float, size: int) -> None:
    """Stain, scanner or slide move all answers of a batch; the labels are in random order."""
    lost = {}
    for allowed in (0.3, 0.0):
        site = Site(RARE, distance, 6)
        labels = site.labels(1600, size, RARE)
        shift = torch.tensor(site.random.normal(0, 0.3, len(labels)), dtype=torch.float32)
        plain = site.answers(labels, torch.stack([torch.zeros_like(shift), shift], dim=-1)[:, None])
        lost[allowed] = nll(corrected(plain, RARE, batch_bias=allowed)[0], labels) - nll(plain, labels)
    assert lost[0.3] < 0.01
    assert lost[0.0] > 2 * lost[0.3]  # so the allowance is needed


@pytest.mark.parametrize("distance", [1.0, 1.5])
def test_another_scanner_for_half_of_the_stream_is_no_skew(distance: float) -> None:
    """All batches depart from the long run then, but not from their neighbours."""
    lost = []
    for seed in range(3):
        site = Site(SEVEN, distance, seed)
        labels = site.labels(1600, 32, SEVEN)
        bias = torch.zeros(len(labels), 1, 7)
        bias[len(labels) // 2 :, :, 0] = 1.5
        plain = site.answers(labels, bias)
        lost.append(accuracy(plain, labels) - accuracy(corrected(plain, SEVEN)[0], labels))
    assert np.mean(lost) < 1.0  # compared with the long run, it is 5.9 points at distance 1


def test_single_images_follow_the_recent_past() -> None:
    site = Site(SEVEN, 2.0, 3)
    labels = site.labels(700, 1, SEVEN)
    for ordered, least in ((labels.sort(dim=0).values, 10.0), (labels, -0.5)):
        plain = site.answers(ordered)
        assert accuracy(corrected(plain, SEVEN)[0], ordered) - accuracy(plain, ordered) > least


def biased(site: Site, labels: Tensor, biases: list[float]) -> Tensor:
    return torch.stack([site.answers(labels, torch.tensor([0.0, bias])) for bias in biases])


def test_a_bias_is_taken_off_where_experts_disagree_and_a_prevalence_is_kept_where_they_agree() -> None:
    site = Site(RARE, 0.8, 4)
    at_home = site.labels(3200, 32, RARE)
    experts = biased(site, at_home, [3.0, -1.0, 2.5])
    mean = torch.softmax(experts.log().mean(dim=0), dim=-1)
    own, _ = corrected(mean, RARE, experts)
    assert nll(own, at_home) < nll(mean, at_home) - 0.05
    elsewhere = site.labels(3200, 32, torch.tensor([0.98, 0.02]))
    experts = biased(site, elsewhere, [0.0, 0.0, 0.0])
    mean = torch.softmax(experts.log().mean(dim=0), dim=-1)
    own, _ = corrected(mean, RARE, experts)
    assert accuracy(own, elsewhere) > accuracy(mean, elsewhere) - 0.3


def test_a_bias_that_all_experts_share_is_taken_off_where_sites_have_measured_it() -> None:
    """Experts that agree show no bias in the stream; reports of other sites do."""
    site, none = Site(RARE, 0.8, 4), torch.zeros(2)
    at_home, elsewhere = (site.labels(3200, 32, torch.tensor(shares)) for shares in ([0.84, 0.16], [0.98, 0.02]))
    shared, unbiased = (biased(site, at_home, [2.0])[0], biased(site, elsewhere, [0.0])[0])
    measured, alike, apart = torch.full((2,), 1.0), torch.full((2,), 0.05), torch.full((2,), 2.0)

    def with_reports(answers: Tensor, prevalence: Tensor, bias: Tensor) -> Tensor:
        unit, out = Correction(LongRun(RARE, prevalence, None, bias)), []
        state = unit.start(1)
        for batch in answers:
            (result,), _, state = unit.correct_all(state, batch, None, None, FadingWindow.of(Batch(batch), 4096))
            out.append(result)
        return torch.stack(out)

    assert nll(with_reports(shared, alike, measured), at_home) < nll(shared, at_home) - 0.2
    same = with_reports(shared, apart, none)  # no bias at any other site: the long run is trusted
    assert torch.allclose(same, corrected(shared, RARE)[0], atol=1e-5)
    unanchored = with_reports(unbiased, apart, torch.full((2,), 0.05))
    assert accuracy(unanchored, elsewhere) > accuracy(unbiased, elsewhere) - 0.3


def test_a_class_that_is_missing_is_prevalence_even_where_experts_disagree() -> None:
    mix = torch.tensor([0.5, 0.3, 0.2])
    long_run = LongRun(mix, torch.full((3,), 0.3), None)
    counts = torch.tensor([[3000.0, 1000.0, 2.0], [2000.0, 2000.0, 1.0], [3500.0, 400.0, 4.0]])
    state = LongRunState(counts.mean(dim=0), counts.mean(dim=0).sum(), counts)
    assumed, expected = long_run.mixes(state)
    assert float(expected[2]) < 2.5 * float(assumed[2])
    assert float(expected[2]) < 0.2 * float(mix[2])


# --- the method -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["ensemble", "mean", "entropy_adaptive"])
def test_the_first_image_is_answered_as_by_the_base(base: str) -> None:
    """Uniform home, nothing seen: no reason to change anything."""
    pool, image = make_pool("vit"), make_images(1)
    own = ms.create_method("corrected", pool, base=base, home="uniform", anchor=0).step(image)
    plain = ms.create_method(base, pool).step(image)
    torch.testing.assert_close(torch.softmax(own.logits, -1), torch.softmax(plain.logits, -1), rtol=0.02, atol=1e-3)
    assert (own.expert_forwards, own.merged_forwards) == (plain.expert_forwards, plain.merged_forwards)


def test_the_experts_are_asked_only_by_a_base_that_asks_them() -> None:
    pool, batch = make_pool("vit"), make_images(4)
    for base, forwards in (
        ("mean", (0, 1)),
        ("ensemble(views=hflip)", (2 * len(pool), 0)),
        ("entropy_adaptive", (2 * len(pool), 1)),
    ):
        step = ms.create_method("corrected", pool, base=base).step(batch)
        assert (step.expert_forwards, step.merged_forwards) == forwards


def refused(**options: object) -> Callable[[], object]:
    return lambda: ms.create_method("corrected", make_pool("vit"), **options)


@pytest.mark.parametrize(
    "create",
    [
        refused(base="corrected"),
        refused(anchor=2),
        refused(anchor="home"),
        refused(anchor="experts", base="mean"),
        refused(anchor="sites"),
        refused(home=[1.0]),
        refused(memory=0),
        refused(batch_bias=-0.1),
    ],
)
def test_wrong_options_are_refused(create: Callable[[], object]) -> None:
    with pytest.raises(ms.MergestreamError):
        create()


@pytest.mark.parametrize("name", ["corrected", "merge_and_fit", "merge_once"])
def test_the_bias_of_a_batch_is_an_option_that_older_records_do_not_name(name: str) -> None:
    pool, batches = make_pool("vit"), [make_images(6, seed=seed) for seed in range(3)]
    usual, same, none = (ms.create_method(name, pool, **each) for each in ({}, {"batch_bias": 0.3}, {"batch_bias": 0}))
    assert "batch_bias" in usual.option_names()
    assert "batch_bias" not in usual.options()
    assert usual.provenance == same.provenance
    assert none.options()["batch_bias"] == 0
    assert none.label() == f"{name}(batch_bias=0.0)"
    one, two = ([method.step(batch).logits for batch in batches] for method in (usual, none))
    torch.testing.assert_close(one[0], two[0])  # nothing is known about batches yet
    assert not torch.equal(one[-1], two[-1])


def test_sites_that_differ_in_prevalence_are_trusted_less_to_be_home() -> None:
    alike, apart = make_pool("vit"), make_pool("vit")
    for number, name in enumerate(alike.names):
        alike = alike.annotate(name, class_counts=dict.fromkeys(CLASSES, 50))
        apart = apart.annotate(name, class_counts=dict.fromkeys(CLASSES, 50) | {CLASSES[0]: 10 ** (number + 1)})
    values = [ms.create_method("corrected", pool).card_values()["prevalence"] for pool in (alike, apart)]
    assert max(values[0]) == pytest.approx(1 / len(alike.names))
    assert values[1][0] > 3 * values[0][0]
