"""Mixes of classes: Bayes' rule, and shares that are never 0."""

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


@given(images=st.integers(1, 9), classes=st.integers(2, 6), seed=st.integers(0, 2**16))
def test_reweighting_is_bayes_rule(images: int, classes: int, seed: int) -> None:
    given_class, then, now = likelihoods(images, classes, seed), simplex(classes, seed), simplex(classes, seed + 1)
    answered = given_class * then / (given_class * then).sum(dim=1, keepdim=True)
    expected = given_class * now / (given_class * now).sum(dim=1, keepdim=True)
    torch.testing.assert_close(class_mix.reweighted(answered, now, then), expected)


def test_no_class_is_ever_impossible() -> None:
    result = class_mix.as_mix(torch.tensor([1.0, 0.0, 0.0]))
    assert result.sum() == pytest.approx(1.0)
    assert (result > 5e-5).all()
