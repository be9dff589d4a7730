"""The recommended rule: an independent reference, simulated features with known truth, and who is asked when."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mergestream as ms
from conftest import CLASSES, NAMES, make_images, make_pool
from mergestream.functional import head_fit
from mergestream.functional.discriminant import discriminant
from mergestream.methods.correction import Correction, LongRun
from mergestream.methods.fading_window import FadingWindow
from mergestream.methods.merge_and_fit import MergeAndFit, together, voice
from mergestream.methods.spelling import parse_variants
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import InputError

STREAM = [make_images(size, seed=seed) for seed, size in enumerate((6, 5, 1, 8, 3))]


# --- reference -------------------------------------------------------------------------------------------------------


def softmax(values: np.ndarray) -> np.ndarray:
    shares = np.exp(values - values.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def log_posteriors(features: np.ndarray, labels: np.ndarray, weights: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Discriminant analysis in double precision, from all images so far: features [N,D], labels [N,C], weights [N]."""
    images, counts = max(weights.sum(), 1.0), labels.T @ weights
    middle = weights @ features / images
    means = np.array(
        [((labels[:, c] * weights) @ features + 4 * middle) / (counts[c] + 4) for c in range(labels.shape[1])]
    )
    centred = features - middle
    covariance = (centred * weights[:, None]).T @ centred / images
    for c, mean in enumerate(means):
        covariance -= counts[c] / images * np.outer(mean - middle, mean - middle)
    ridge = (0.1 + 32 / images) * np.diag(covariance).mean()
    inverse = np.linalg.inv(covariance + ridge * np.eye(len(covariance)))
    shares = np.maximum(counts / counts.sum(), 1e-4)
    away = means - middle
    scores = (new - middle) @ inverse @ away.T - 0.5 * np.einsum("cd,de,ce->c", away, inverse, away) + np.log(shares)
    return np.log(softmax(scores))


def merged_model(pool: ms.ExpertPool, images: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the mean model, and what its last layer reads."""
    network, read = pool.network([1 / len(pool)] * len(pool)), []
    head = network.get_submodule(pool.template.head[0])
    head.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    with torch.no_grad():
        logits = network(pool.prepare(images))
    return logits.double().numpy(), read[0].double().numpy()


def spoken(answers: np.ndarray) -> np.ndarray:
    """Log-answers of one voice, with its doubt of 1 %."""
    return np.log(0.99 * answers + 0.01 / answers.shape[-1])


def reference(pool: ms.ExpertPool, temperature: float, memory: float, asked: list[bool]) -> list[np.ndarray]:
    """Answers to STREAM without the correction for the mix of classes."""
    features, labels, weights = np.zeros((0, 32)), np.zeros((0, len(CLASSES))), np.zeros(0)
    answers = []
    for images, asks in zip(STREAM, asked, strict=True):
        both = [pool.logits(images), pool.logits(images, "hflip")]
        experts = softmax(torch.stack(both).mean(dim=0).double().numpy() / temperature)
        logits, new = merged_model(pool, images)
        voices = [*map(spoken, experts)] if asks else []
        voices.append(spoken(softmax(logits)))
        common = softmax(np.mean(voices, axis=0))
        known = len(features) > 0
        own = (
            np.exp(log_posteriors(features, labels, weights, new)) if known else np.full_like(common, 1 / len(CLASSES))
        )
        voices.append(spoken(own))
        if asks:
            features, labels = np.concatenate([features, new]), np.concatenate([labels, common])
            weights = np.concatenate([weights * np.exp(-len(images) / memory), np.ones(len(images))])
        answers.append(softmax(np.mean(voices, axis=0)))
    return answers


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, [True] * 5),
        ({"memory": 10, "temperature": 0.5}, [True] * 5),
        ({"ask_first": 8, "ask_every": 0}, [True, True, False, False, False]),
        ({"ask_first": 1, "ask_every": 2}, [True, False, True, False, True]),
    ],
    ids=str,
)
def test_the_rule_is_that_of_the_page(options: dict, asked: list[bool]) -> None:
    pool = make_pool("vit")
    method = ms.create_method("merge_and_fit", pool, correct=False, **options)
    expected = reference(pool, options.get("temperature", 1.0), options.get("memory", 4096), asked)
    for images, asks, answer in zip(STREAM, asked, expected, strict=True):
        step = method.step(images)
        np.testing.assert_allclose(torch.softmax(step.logits, -1).numpy(), answer, rtol=2e-3, atol=2e-4)
        assert (step.expert_forwards, step.merged_forwards) == (2 * len(pool) * asks, 1)


def test_answers_are_corrected_by_what_the_experts_say_about_the_mix() -> None:
    pool = make_pool("vit")
    method, plain = (ms.create_method("merge_and_fit", pool, correct=correct) for correct in (True, False))
    home = torch.full((len(CLASSES),), 1 / len(CLASSES))
    correction = Correction(LongRun(home, torch.ones_like(home), 0.0))
    mix, long_run = correction.start(len(pool)), correction.start(len(pool)).long_run
    assert isinstance(plain, MergeAndFit)
    head = plain._head.start()
    for images in STREAM:
        batch = Batch(pool.prepare(images))
        window = FadingWindow.of(batch, 4096)
        merged, features = plain._merged_model(batch, plain.start())
        logits = [*plain._experts(batch), merged]
        common, before = together(voice(torch.stack(logits))), mix
        (labels,), _, mix = correction.correct_all(before, common, None, None, window)
        answers = together(voice(torch.stack([*logits, plain._head.logits(head, features)])))
        head = plain._head.learn(head, features, labels, window)
        long_run = correction.long_run.learn(long_run, answers, None, window)
        evidence, _ = correction.learn(before, common, None, window)
        (expected,) = correction.apply(evidence, [(long_run, answers)], window)
        torch.testing.assert_close(torch.softmax(method.step(images).logits, -1), expected, rtol=1e-4, atol=1e-6)


# --- the discriminant ------------------------------------------------------------------------------------------------


def simulated(classes: int, distance: float, seed: int, images: int = 2000) -> tuple[Tensor, Tensor, Tensor]:
    """Features of Gaussian classes, labels, and the answers of a teacher that sees the classes through much noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=generator)
    means = torch.randn(classes, 16, generator=generator)
    means = distance * means / means.norm(dim=1, keepdim=True)
    features = means[labels] + torch.randn(images, 16, generator=generator)
    noisy = torch.nn.functional.one_hot(labels, classes) + torch.randn(images, classes, generator=generator)
    return features, labels, torch.softmax(noisy, dim=1)


def fitted(features: Tensor, answers: Tensor) -> Tensor:
    shares = torch.full((len(features),), 1 / len(features))
    sums = len(features) * head_fit.sums(features, answers, shares)
    weight, bias = discriminant(sums, torch.zeros(answers.shape[1], features.shape[1]))
    return features @ weight.T + bias


@pytest.mark.parametrize("classes", [2, 5])
def test_the_head_learns_more_than_its_teacher_knows(classes: int) -> None:
    features, labels, teacher = simulated(classes, 4.0, seed=classes)
    own, theirs = (
        float((answers.argmax(1) == labels).float().mean()) for answers in (fitted(features, teacher), teacher)
    )
    assert own > theirs + 0.1


@given(classes=st.integers(2, 5), seed=st.integers(0, 100))
def test_features_that_say_nothing_give_the_classes_shares(classes: int, seed: int) -> None:
    features, _, _ = simulated(classes, 1.0, seed, images=40)
    answers = torch.softmax(torch.arange(classes).float(), 0).expand(40, -1)
    torch.testing.assert_close(torch.softmax(fitted(features, answers), 1), answers, rtol=1e-3, atol=1e-4)


@given(seed=st.integers(0, 100))
def test_a_shift_of_all_features_changes_nothing(seed: int) -> None:
    features, _, teacher = simulated(3, 2.0, seed, images=60)
    moved = fitted(features + 0.5, teacher)
    torch.testing.assert_close(
        torch.softmax(moved, 1), torch.softmax(fitted(features, teacher), 1), rtol=1e-2, atol=1e-3
    )


# --- who is asked ----------------------------------------------------------------------------------------------------


def test_merge_once_costs_one_forward_per_image_after_the_first() -> None:
    method = ms.create_method("merge_once", make_pool("vit"), ask_first=16, ask_drift=0.0)
    steps = [method.step(make_images(8, seed=seed)) for seed in range(6)]
    assert [step.expert_forwards for step in steps] == [6, 6, 0, 0, 0, 0]
    assert {step.merged_forwards for step in steps} == {1}


def test_the_experts_are_asked_again_when_images_are_unlike_those_of_the_fit() -> None:
    method = ms.create_method("merge_once", make_pool("vit"), ask_first=512, ask_drift=0.2, correct=False)
    usual = make_images(2, seed=3).repeat(32, 1, 1, 1)
    asked = [method.step(usual).expert_forwards > 0 for _ in range(16)]
    assert asked == [True] * 8 + [False] * 8
    asked = [method.step(make_images(64, seed=9)).expert_forwards > 0 for _ in range(12)]
    assert not asked[0]
    assert sum(asked) >= 8  # another 512 images, from the alarm on


def test_a_loud_head_does_not_decide_alone() -> None:
    """An expert whose head is multiplied by 1,000 is certain of everything; two that contradict it outvote it."""
    pool = make_pool("vit")
    logits = torch.zeros(len(pool), 4, len(CLASSES))
    logits[0, :, 0], logits[1:, :, 1] = 1000.0, 5.0
    method = ms.create_method("merge_and_fit", pool, views=())
    voices = method._experts(Batch(pool.prepare(make_images(4)), {"original": logits}))
    assert set(together(voice(voices)).argmax(dim=1).tolist()) == {1}
    assert set(logits.mean(dim=0).argmax(dim=1).tolist()) == {0}  # it decides where logits are averaged


def test_an_expert_does_not_veto_a_class_that_it_never_saw() -> None:
    pool = make_pool("vit")
    counts = {NAMES[0]: dict.fromkeys(CLASSES[1:], 9)} | dict.fromkeys(NAMES[1:], dict.fromkeys(CLASSES, 9))
    for name, own in counts.items():
        pool = pool.annotate(name, class_counts=own)
    logits = torch.zeros(len(pool), 4, len(CLASSES))
    logits[:, :, 0] = torch.tensor([-50.0, 5.0, 5.0])[:, None]  # the others are sure of the first class
    method = ms.create_method("merge_and_fit", pool, views=())
    batch = Batch(pool.prepare(make_images(4)), {"original": logits})
    assert float(together(voice(method._experts(batch)))[:, 0].min()) > 0.95


@pytest.mark.parametrize(("network", "speaks"), [("vit", True), ("resnet", False)])
def test_a_merged_model_with_batchnorm_has_no_say(network: str, speaks: bool) -> None:
    method = ms.create_method("merge_and_fit", make_pool(network))
    assert method._merged_speaks is speaks


def test_the_merged_weights_answer_as_merged_model_and_head_together() -> None:
    pool = make_pool("vit")
    method = ms.create_method("merge_once", pool, ask_first=8, ask_drift=0.0, correct=False)
    for seed in range(2):
        method.step(make_images(8, seed=seed))
    images = make_images(8, seed=2)
    mean, features = merged_model(pool, images)
    head = method._head.logits(method.state.head, torch.tensor(features).float())
    together = torch.log_softmax((torch.log_softmax(torch.tensor(mean).float(), dim=-1) + head) / 2, dim=-1)
    own = torch.log_softmax(pool.forward(method.merged_weights(), images), dim=-1)
    torch.testing.assert_close(own, together, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"ask_first": 0}, {"ask_every": -1}, {"ask_drift": -0.1}, {"memory": 0}, {"correct": 2}],
    ids=str,
)
def test_wrong_options_are_refused(options: dict) -> None:
    with pytest.raises(InputError):
        ms.create_method("merge_and_fit", make_pool("vit"), **options)


def test_the_rule_of_version_0_1_names_its_successor() -> None:
    with pytest.raises(InputError, match="use 'merge_and_fit' instead"):
        ms.create_method("prior_adaptive", make_pool("vit"))
    with pytest.raises(InputError, match="use 'merge_and_fit' instead"):
        parse_variants("mean, prior_adaptive(anchor=0)")
    assert len(MergeAndFit.option_names()) <= 8
