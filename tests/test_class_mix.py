"""The mix of classes in a stream: Bayes' rule, closed forms, and what a Dirichlet stream is known to be."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mergestream.functional import class_mix


def simplex(count: int, seed: int) -> Tensor:
    return class_mix.as_mix(torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.05)


def likelihoods(images: int, classes: int, seed: int) -> Tensor:
    return torch.rand(images, classes, generator=torch.Generator().manual_seed(seed)) + 1e-3


def even(images: int) -> Tensor:
    return torch.full((images,), 1 / images)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    return torch.nn.functional.one_hot(labels, classes).float()


sizes = {"images": st.integers(1, 9), "classes": st.integers(2, 6), "seed": st.integers(0, 2**16)}


@given(**sizes)
def test_reweighting_is_bayes_rule(images: int, classes: int, seed: int) -> None:
    given_class, then, now = likelihoods(images, classes, seed), simplex(classes, seed), simplex(classes, seed + 1)
    answered = given_class * then / (given_class * then).sum(dim=1, keepdim=True)
    expected = given_class * now / (given_class * now).sum(dim=1, keepdim=True)
    torch.testing.assert_close(class_mix.reweighted(answered, now, then), expected)


@given(**sizes)
def test_certain_answers_have_a_mix_in_closed_form(images: int, classes: int, seed: int) -> None:
    labels = torch.randint(classes, (images,), generator=torch.Generator().manual_seed(seed))
    expected, strength = simplex(classes, seed), torch.tensor(7.0)
    mix = class_mix.mix_of_batch(one_hot(labels, classes), simplex(classes, seed + 1), expected, strength, even(images))
    counts = torch.bincount(labels, minlength=classes)
    torch.testing.assert_close(mix, (counts + strength * expected) / (images + strength))


@given(**sizes)
def test_the_mix_is_on_the_simplex_and_does_not_know_the_order(images: int, classes: int, seed: int) -> None:
    p = torch.softmax(3 * torch.randn(images, classes, generator=torch.Generator().manual_seed(seed)), dim=1)
    assumed, expected, strength = simplex(classes, seed), simplex(classes, seed + 1), torch.tensor(2.0)
    mix = class_mix.mix_of_batch(p, assumed, expected, strength, even(images))
    torch.testing.assert_close(mix.sum(), torch.tensor(1.0))
    assert (mix > 0).all()
    order = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))
    turned = class_mix.mix_of_batch(p[:, order].flip(0), assumed[order], expected[order], strength, even(images))
    torch.testing.assert_close(turned, mix[order])


@given(padding=st.integers(1, 4), **sizes)
def test_padding_counts_for_nothing(padding: int, images: int, classes: int, seed: int) -> None:
    p = torch.softmax(3 * torch.randn(images, classes, generator=torch.Generator().manual_seed(seed)), dim=1)
    padded = torch.cat([p, p[:1].expand(padding, -1)])
    shares = torch.cat([even(images), torch.zeros(padding)])
    assumed, expected, strength = simplex(classes, seed), simplex(classes, seed + 1), torch.tensor(2.0)
    for function, others in ((class_mix.mix_of_batch, (assumed, expected, strength)), (class_mix.clumped, (expected,))):
        whole = function(p, *others, even(images))
        torch.testing.assert_close(function(padded, *others, shares), whole)


@pytest.mark.parametrize("images", [4, 32])
@pytest.mark.parametrize("strength", [0.5, 5.0, 50.0])
def test_clumping_finds_the_concentration_that_batches_were_drawn_with(images: int, strength: float) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.tensor([0.5, 0.3, 0.2])
    drawn = np.random.default_rng(0).dirichlet(strength * expected.double().numpy(), 4000)
    mixes = torch.from_numpy(drawn).float()
    labels = torch.multinomial(mixes, images, replacement=True, generator=generator)
    result = [class_mix.clumped(one_hot(batch, 3), expected, even(images)) for batch in labels]
    assert torch.stack(result).mean() == pytest.approx(1 / (1 + strength), abs=0.015)


def test_clumping_at_its_ends() -> None:
    uniform = torch.full((4,), 0.25)
    same, apart = torch.zeros(8, dtype=torch.long), torch.arange(8) % 4
    assert class_mix.clumped(one_hot(same, 4), uniform, even(8)) == pytest.approx(1.0)
    assert class_mix.clumped(one_hot(apart, 4), uniform, even(8)) < 0
    assert class_mix.clumped(one_hot(same[:1], 4), uniform, even(1)) == 0
    assert class_mix.concentration(torch.tensor(-3.0)) > 1000
    assert class_mix.concentration(torch.tensor(1.0)) == pytest.approx(0.5)


def test_between_two_mixes() -> None:
    seen, home = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    torch.testing.assert_close(class_mix.between(seen, home, 0.0), seen)
    torch.testing.assert_close(class_mix.between(seen, home, 1.0), home)
    middle = (seen * home).sqrt()
    torch.testing.assert_close(class_mix.between(seen, home, 0.5), middle / middle.sum())


def test_no_class_is_ever_impossible() -> None:
    result = class_mix.as_mix(torch.tensor([1.0, 0.0, 0.0]))
    assert result.sum() == pytest.approx(1.0)
    assert (result > 5e-5).all()


@given(st.integers(0, 10**6), st.floats(0.1, 10), st.integers(2, 6), st.integers(1, 5))
def test_a_scale_is_found_whatever_is_added_to_all_images(seed: int, factor: float, classes: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(1, 40, classes, generator=generator)
    others = factor * own + torch.randn(experts, 1, classes, generator=generator) + 5
    even = torch.full((40,), 1 / 40)
    sums = [1e6 * class_mix.moments(logits, even) for logits in (own, others)]  # so many that all is believed
    assert float(class_mix.scale_between(*sums)) == pytest.approx(factor, rel=2e-3)


def test_a_scale_starts_at_one_and_padding_counts_for_nothing() -> None:
    nothing = torch.zeros(1, 5), torch.zeros(3, 5)
    assert float(class_mix.scale_between(*nothing)) == 1
    one_image = class_mix.moments(torch.randn(1, 1, 3), torch.ones(1))
    assert float(class_mix.scale_between(one_image, 9 * one_image)) == 1
    logits = torch.randn(2, 6, 3)
    padded = torch.cat([logits, 100 * torch.randn(2, 4, 3)], dim=1)
    shares = torch.tensor([1 / 6] * 6 + [0.0] * 4)
    torch.testing.assert_close(class_mix.moments(padded, shares), class_mix.moments(logits, torch.full((6,), 1 / 6)))
