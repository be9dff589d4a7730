"""A last layer fitted to what experts said: against a solver, in its limits, and inside a merged model."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mergestream as ms
from conftest import make_images, make_pool
from mergestream.functional import head_fit
from mergestream.methods.fading_window import FadingWindow
from mergestream.methods.fitted_head import FittedHead
from mergestream.methods.merge_and_fit import together, voice
from mergestream.networks.layers import LastLayer
from mergestream.runtime.errors import InputError, NetworkError

IMAGES, INPUTS, CLASSES = 400, 12, 3


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def even(count: int) -> Tensor:
    return torch.full((count,), 1 / count)


def exact(inputs: np.ndarray, answers: np.ndarray, counts: np.ndarray, start: np.ndarray, before: float) -> np.ndarray:
    """Answers of the ridge regression of `answers` on `inputs`, each row counting so much, towards `start`."""
    share = counts / counts.sum()
    middle, expected = share @ inputs, share @ answers
    apart = inputs - middle
    covariance = (apart * share[:, None]).T @ apart
    ridge = before / counts.sum() * np.trace(covariance) / len(covariance)
    right = (apart * share[:, None]).T @ (answers - expected) + ridge * start.T
    weight = np.linalg.solve(covariance + ridge * np.eye(len(covariance)), right)
    return apart @ weight + expected


@pytest.mark.parametrize("before", [1.0, 32.0, 1000.0])
def test_a_stream_of_batches_gives_the_ridge_regression(before: float) -> None:
    mixing = drawn(1, INPUTS, INPUTS) * torch.logspace(0, -2, INPUTS)  # directions of very different spread
    inputs = drawn(2, IMAGES, INPUTS) @ mixing + 5 * drawn(3, INPUTS)
    answers = torch.tanh(inputs @ drawn(4, INPUTS, CLASSES)) + 0.3 * drawn(5, IMAGES, CLASSES)
    start, faded = drawn(6, CLASSES, INPUTS), 0.9
    sums, change = torch.zeros(1 + INPUTS, 1 + INPUTS + CLASSES), torch.zeros(CLASSES, INPUTS)
    for batch in range(0, IMAGES, 20):
        own = slice(batch, batch + 20)
        sums = faded * sums + 20 * head_fit.sums(inputs[own], answers[own], even(20))
        change, bias = head_fit.fitted(sums, start, torch.zeros(CLASSES), before, change)
    counts = faded ** (19 - np.arange(IMAGES) // 20)
    expected = exact(inputs.double().numpy(), answers.double().numpy(), counts, start.double().numpy(), before)
    result = inputs @ (start + change).T + bias
    torch.testing.assert_close(result.double(), torch.tensor(expected), rtol=0, atol=0.02)


@given(seed=st.integers(0, 10_000), count=st.integers(40, 80))
def test_a_linear_teacher_is_found(seed: int, count: int) -> None:
    """Whatever layer it starts from: with more images than inputs nothing is left of that."""
    inputs, teacher, offset = drawn(seed, count, 4), drawn(seed + 1, 2, 4), drawn(seed + 2, 2)
    answers = inputs @ teacher.T + offset
    start = drawn(seed + 3, 2, 4)
    sums = count * head_fit.sums(inputs, answers, even(count))
    change, bias = head_fit.fitted(sums, start, torch.zeros(2), 1e-3, torch.zeros(2, 4))
    torch.testing.assert_close(inputs @ (start + change).T + bias, answers, rtol=0, atol=1e-2)


@given(seed=st.integers(0, 10_000), count=st.integers(1, 5))
def test_where_little_was_said_the_start_stays(seed: int, count: int) -> None:
    """A few images move the layer along their own differences alone, and always to what was said on average."""
    inputs, answers, start = drawn(seed, count, 8), drawn(seed + 1, count, 2), drawn(seed + 2, 2, 8)
    sums = count * head_fit.sums(inputs, answers, even(count))
    change, bias = head_fit.fitted(sums, start, torch.zeros(2), 1e6, torch.zeros(2, 8))
    torch.testing.assert_close(change, torch.zeros(2, 8), rtol=0, atol=1e-3)
    torch.testing.assert_close(
        (inputs @ (start + change).T + bias).mean(dim=0), answers.mean(dim=0), rtol=1e-3, atol=1e-3
    )


def test_padding_counts_nothing() -> None:
    inputs, answers = drawn(0, 6, 4), drawn(1, 6, 2)
    shares = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0, 0.0])
    torch.testing.assert_close(
        head_fit.sums(inputs, answers, shares), head_fit.sums(inputs[:4], answers[:4], even(4)), rtol=1e-6, atol=1e-6
    )


def test_a_layer_that_reads_always_the_same_is_left_alone() -> None:
    inputs, start = torch.ones(8, 4), drawn(0, 2, 4)
    sums = 8 * head_fit.sums(inputs, drawn(1, 8, 2), even(8))
    change, bias = head_fit.fitted(sums, start, torch.zeros(2), 32, torch.zeros(2, 4))
    assert bool(torch.isfinite(change).all())
    assert bool(torch.isfinite(bias).all())
    torch.testing.assert_close(change, torch.zeros(2, 4), rtol=0, atol=1e-3)


def test_before_anything_was_said_the_layer_is_the_merged_one() -> None:
    start, own = drawn(0, 2, 4), drawn(1, 2)
    change, bias = head_fit.fitted(torch.zeros(5, 7), start, own, 32, torch.zeros(2, 4))
    assert torch.equal(change, torch.zeros(2, 4))
    assert torch.equal(bias, own)


@pytest.mark.parametrize("before", [1e-9, 1e-4, 32.0])
def test_inputs_of_few_directions_give_finite_answers(before: float) -> None:
    """Three directions of 128, eight images a batch: all other directions have no curvature but rounding's."""
    inputs = drawn(0, 800, 3) @ drawn(1, 3, 128)
    answers, start = drawn(2, 800, 2), drawn(3, 2, 128)
    sums, change = torch.zeros(129, 131), torch.zeros(2, 128)
    for batch in range(0, 800, 8):
        own = slice(batch, batch + 8)
        sums = 0.99 * sums + 8 * head_fit.sums(inputs[own], answers[own], even(8))
        change, bias = head_fit.fitted(sums, start, torch.zeros(2), before, change)
        assert float((inputs[own] @ (start + change).T + bias).abs().max()) < 100


def test_inputs_far_from_zero_lose_no_digits() -> None:
    """Features of 1,000 that vary by 0.1: squares of them would say nothing of it in 32 bits."""
    inputs, teacher, faded = 1000 + 0.1 * drawn(0, IMAGES, 4), drawn(1, 2, 4), torch.tensor(0.99)
    answers = (inputs - 1000) @ teacher.T
    head = FittedHead(LastLayer("fc", slice(0, 8), slice(8, 10), torch.Size((2, 4))), 0.01, torch.device("cpu"))
    merged, state = torch.zeros(10), head.start()
    window = FadingWindow(even(20), torch.tensor(20.0), faded)
    for batch in range(0, IMAGES, 20):
        own = slice(batch, batch + 20)
        state = head.learn(state, inputs[own], answers[own], window)
        result, state = head.answer(state, merged, inputs[own])
    torch.testing.assert_close(result, answers[own], rtol=0, atol=1e-3)
    weight, bias = head.layer(state, merged)
    again = inputs[own].double() @ weight.T.double() + bias
    torch.testing.assert_close(again, answers[own].double(), rtol=0, atol=1e-2)


def test_a_state_of_another_layer_is_refused() -> None:
    method = ms.create_method("merge_and_fit", make_pool("vit"))
    with pytest.raises(InputError, match="'head_sums' has the shape"):
        method.read_state({"head_sums": torch.zeros(3, 3)})


# --- the last layer of a network ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_what_the_last_layer_read_gives_the_logits(kind: str) -> None:
    pool, images = make_pool(kind), make_images(5)
    weights = pool.merge([0.5, 0.3, 0.2])
    logits, inputs = pool.forward_with_inputs(weights, images)
    layer = pool.last_layer
    assert layer is not None
    again = inputs @ weights[layer.weight].view(layer.shape).T + weights[layer.bias]
    torch.testing.assert_close(again, logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool.forward(weights, images), logits)
    assert not pool.module_with(weights).get_submodule(layer.name)._forward_pre_hooks


class Ending(nn.Module):
    """A network that ends as its head does."""

    def __init__(self, head: nn.Module, *, tokens: bool = False) -> None:
        super().__init__()
        self.encoder, self.fc, self._tokens = nn.Linear(4, 4), head, tokens

    def forward(self, images: Tensor) -> Tensor:
        read = self.encoder(images.flatten(1))
        if isinstance(self.fc, nn.Conv2d):
            return self.fc(read[:, :, None, None]).flatten(1)
        return self.fc(read[:, None].expand(-1, 3, -1)).mean(dim=1) if self._tokens else self.fc(read)


ENDINGS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: Ending(nn.Conv2d(4, 2, 1)),
    "no bias": lambda: Ending(nn.Linear(4, 2, bias=False)),
    "a norm": lambda: Ending(nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))),
    "every token": lambda: Ending(nn.Linear(4, 2), tokens=True),
}


def ending(make: Callable[[], nn.Module]) -> ms.ExpertPool:
    torch.manual_seed(0)
    return ms.ExpertPool.from_modules({f"site{k}": make() for k in range(2)}, head="fc")


@pytest.mark.parametrize("kind", ["convolution", "no bias", "a norm", "every token"])
def test_the_experts_answer_for_a_network_that_ends_otherwise(kind: str) -> None:
    pool = ending(ENDINGS[kind])
    method = ms.create_method("merge_and_fit", pool, views=(), correct=False)
    for seed in range(3):
        images = drawn(seed, 6, 1, 2, 2)
        merged = pool.forward(pool.merge([1 / len(pool)] * len(pool)), images)
        voices = voice(torch.cat([pool.logits(images), merged[None]]))
        torch.testing.assert_close(method.step(images).logits, together(voices).log())
    with pytest.raises(NetworkError, match="cannot answer without the experts"):
        ms.create_method("merge_once", pool, views=()).step(images)


@pytest.mark.parametrize("kind", ["convolution", "no bias", "a norm"])
def test_there_is_no_last_layer_to_read(kind: str) -> None:
    pool = ending(ENDINGS[kind])
    assert pool.last_layer is None
    with pytest.raises(NetworkError, match="linear layer"):
        pool.forward_with_inputs(pool.merge([0.5, 0.5]), drawn(0, 2, 1, 2, 2))


def test_a_layer_that_reads_every_token_is_given_back_as_it_was() -> None:
    pool = ending(ENDINGS["every token"])
    weights = pool.merge([0.5, 0.5])
    with pytest.raises(NetworkError, match="not one per image"):
        pool.forward_with_inputs(weights, drawn(0, 4, 1, 2, 2))
    assert not pool.module_with(weights).get_submodule("fc")._forward_pre_hooks
