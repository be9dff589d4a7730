"""Rivals that wrap another method, against plain numpy written from their equations."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mergestream as ms
from conftest import CLASSES, NAMES, make_experts, make_images, make_pool
from mergestream.bench.engine.pool_at_target import method_of
from mergestream.methods import METHODS
from mergestream.methods.spelling import parse_variants
from mergestream.methods.state import State, for_experts, leaves
from mergestream.methods.wrapper import Wrapper
from mergestream.pool.runner import Batch
from test_training_graph import HostTraffic

SIZES = (5, 4, 1, 2)
BASES = ("mean", "ensemble")


@cache
def pool() -> ms.ExpertPool:
    return make_pool("vit")


@cache
def binary_pool() -> ms.ExpertPool:
    def factory() -> nn.Module:
        return timm.create_model(
            "vit_tiny_patch16_224", num_classes=2, img_size=16, patch_size=8, depth=1, embed_dim=8, num_heads=2
        )

    return ms.ExpertPool.from_modules(make_experts(factory), classes=CLASSES[:2])


POOLS = {"five classes": pool, "two classes": binary_pool}
every_pool = pytest.mark.parametrize("own", POOLS.values(), ids=POOLS)


def stream(start: int = 0) -> list[Tensor]:
    return [make_images(size, seed=start + number) for number, size in enumerate(SIZES)]


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(p)).sum(axis=-1)


def observed(base: str, of: ms.ExpertPool, images: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The base's logits [B,C], and the mean network's features [B,D] from a module of its own."""
    network, features = of.network([1 / len(of)] * len(of)), []
    network.head.register_forward_pre_hook(lambda _, given: features.append(given[0]))
    with torch.no_grad():
        network(of.prepare(images))
    logits = ms.create_method(base, of).step(images).logits
    return logits.double().numpy(), features[0].double().numpy()


def answers(method: ms.Method, batches: list[Tensor]) -> list[np.ndarray]:
    return [softmax(method.step(batch).logits.double().numpy()) for batch in batches]


def padded(of: ms.ExpertPool, images: Tensor, more: int = 3) -> Batch:
    shares = torch.cat([torch.full((len(images),), 1 / len(images)), torch.zeros(more)])
    return Batch(of.prepare(torch.cat([images, images[:1].expand(more, -1, -1, -1)])), shares=shares)


# --- LAME -------------------------------------------------------------------------------------------------------------


def lame_reference(p: np.ndarray, features: np.ndarray, k: int) -> np.ndarray:
    images, unit = len(p), features / np.linalg.norm(features, axis=1, keepdims=True)
    affinity = np.zeros((images, images))
    for i in range(images):
        others = sorted((np.linalg.norm(unit[i] - unit[j]), j) for j in range(images) if j != i)
        for _, j in others[:k]:
            affinity[i, j] = 1
    affinity = (affinity + affinity.T) / 2
    y, before = p, np.inf
    for number in range(100):
        pull = affinity @ y
        y = softmax(np.log(p) + pull)
        energy = (y * np.log(y) - y * np.log(p) - y * pull).sum()
        if number > 1 and abs(energy - before) <= 1e-8 * abs(before):
            break
        before = energy
    return y


@every_pool
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("k", [1, 3, 5])
def test_lame_is_the_published_rule(own, base: str, k: int) -> None:
    method = ms.create_method("lame", own(), base=base, k=k)
    for images, answer in zip(stream(), answers(method, stream()), strict=True):
        logits, features = observed(base, own(), images)
        np.testing.assert_allclose(answer, lame_reference(softmax(logits), features, k), rtol=1e-3, atol=1e-5)


def test_lame_without_neighbours_is_its_base() -> None:
    plain = answers(ms.create_method("mean", pool()), stream())
    for own, base in zip(answers(ms.create_method("lame", pool(), k=0), stream()), plain, strict=True):
        np.testing.assert_allclose(own, base, rtol=1e-5, atol=1e-7)
    alone = ms.create_method("lame", pool()).step(make_images(1)).logits  # nobody to agree with
    np.testing.assert_allclose(softmax(alone.numpy()), plain_answer(make_images(1)), rtol=1e-5, atol=1e-7)


def plain_answer(images: Tensor) -> np.ndarray:
    return softmax(observed("mean", pool(), images)[0])


# --- T3A --------------------------------------------------------------------------------------------------------------


def t3a_reference(of: ms.ExpertPool, base: str, batches: list[Tensor], most: int, unit: bool) -> list[np.ndarray]:
    """As published: lists that grow, sorted anew for every batch."""
    network, out = of.network([1 / len(of)] * len(of)), []
    weight, bias = (each.detach().double().numpy() for each in (network.head.weight, network.head.bias))
    rows = [
        (e, list(w / np.linalg.norm(w)))
        for e, w in zip(entropy(softmax(weight @ weight.T + bias)), weight, strict=True)
    ]
    sets = [[row] for row in rows]
    for images in batches:
        logits, features = observed(base, of, images)
        features = features / np.linalg.norm(features, axis=1, keepdims=True)
        for p, feature in zip(softmax(logits), features, strict=True):
            sets[p.argmax()].append((entropy(p), list(feature)))
        chosen = [np.array([z for _, z in sorted(each)[:most]]) for each in sets]
        prototypes = np.array([each.mean(axis=0) for each in chosen])
        if unit:
            prototypes /= np.linalg.norm(prototypes, axis=1, keepdims=True)
        out.append(features @ prototypes.T)
    return out


@every_pool
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("most", "unit"), [(1, False), (2, False), (3, True), (100, False)])
def test_t3a_is_the_published_rule(own, base: str, most: int, unit: bool) -> None:
    batches = stream() + stream(10)
    method = ms.create_method("t3a", own(), base=base, supports=most, unit_prototypes=unit)
    before = [leaf.shape for leaf in leaves(method.state)]
    expected = t3a_reference(own(), base, batches, most, unit)
    for images, logits in zip(batches, expected, strict=True):
        np.testing.assert_allclose(method.step(images).logits.numpy(), logits, rtol=1e-3, atol=1e-4)
    assert [leaf.shape for leaf in leaves(method.state)] == before, "a long stream needs no more memory"


def test_t3a_without_supports_is_the_normalised_head() -> None:
    method = ms.create_method("t3a", pool())
    state, (weight, bias) = method.start(), method.last_layer_of(method.start().base)
    prototypes = method._prototypes(state.supports, state.entropy, weight, bias)
    torch.testing.assert_close(prototypes, weight / weight.norm(dim=1, keepdim=True))


# --- label shift ------------------------------------------------------------------------------------------------------


def em_reference(p: np.ndarray, home: np.ndarray) -> np.ndarray:
    mix = home
    for _ in range(100):
        joint = p * mix / home
        mix = (joint / joint.sum(axis=1, keepdims=True)).mean(axis=0)
    return mix


@every_pool
@pytest.mark.parametrize("window", [3, 512])
def test_label_shift_is_the_published_rule(own, window: int) -> None:
    classes = len(own().classes)
    home = np.arange(1, classes + 1) / sum(range(1, classes + 1))
    method = ms.create_method("label_shift", own(), window=window, home=home.tolist())
    past = np.zeros((0, classes))
    for images, answer in zip(stream(), answers(method, stream()), strict=True):
        p = softmax(observed("mean", own(), images)[0])
        past = np.concatenate([past, p])[-window:]
        joint = p * em_reference(past, home) / home
        np.testing.assert_allclose(answer, joint / joint.sum(axis=1, keepdims=True), rtol=1e-3, atol=1e-5)


class Simulated:
    """Answers that are calibrated for a home mix, to images of a stream with another."""

    def __init__(self, home: list[float], mix: list[float], images: int) -> None:
        random, classes = np.random.default_rng(0), len(home)
        self.labels = random.choice(classes, size=images, p=mix)
        seen = 2.0 * np.eye(classes)[self.labels] + random.normal(size=(images, classes))
        self.p = softmax(2.0 * seen - 2.0 + np.log(home))


def with_confusion(of: ms.ExpertPool, matrix: list[list[int]]) -> ms.ExpertPool:
    for name in of.names:
        of = of.annotate(name, metrics={"validation": {"confusion": matrix}})
    return of


@pytest.mark.parametrize("rule", ["em", "bbse"])
def test_a_simulated_mix_is_recovered(rule: str) -> None:
    home, mix = [0.5, 0.3, 0.1, 0.05, 0.05], [0.1, 0.2, 0.1, 0.2, 0.4]
    at_home, elsewhere = Simulated(home, home, 8000), Simulated(home, mix, 4000)
    matrix = np.zeros((5, 5), dtype=int)
    np.add.at(matrix, (at_home.labels, at_home.p.argmax(axis=1)), 1)
    method = ms.create_method(
        "label_shift", with_confusion(pool(), matrix.tolist()), method=rule, home=home, window=4000
    )
    window, filled = torch.tensor(elsewhere.p, dtype=torch.float32), torch.ones(4000)
    estimate = method._expected(window, filled) if rule == "em" else method._solved(window, filled)
    assert np.abs(estimate.numpy() - np.bincount(elsewhere.labels) / 4000).max() < 0.03
    assert np.abs(estimate.numpy() - mix).max() < 0.03


def test_bbse_solves_the_confusion() -> None:
    """Two classes, of which 90 % and 60 % are recognised; four of ten answers are the second."""
    of = with_confusion(binary_pool(), [[90, 10], [40, 60]])
    method = ms.create_method("label_shift", of, method="bbse", home=[0.5, 0.5])
    window = torch.tensor([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4)
    # 0.9 a + 0.4 b = 0.6 and 0.1 a + 0.6 b = 0.4: a = 0.4, b = 0.6.
    torch.testing.assert_close(method._solved(window, torch.ones(10)), torch.tensor([0.4, 0.6]))
    assert method.card_values()["confusion"] == [
        [pytest.approx(0.9), pytest.approx(0.4)],
        [pytest.approx(0.1), pytest.approx(0.6)],
    ]
    one_sided = method._solved(window[:6], torch.ones(6))  # would be 1.2 and -0.2
    torch.testing.assert_close(one_sided, torch.tensor([1.0, 0.0]))
    assert torch.isfinite(method.step(make_images(3)).logits).all()


def test_a_class_without_validation_images_counts_as_recognised() -> None:
    method = ms.create_method("label_shift", with_confusion(binary_pool(), [[8, 2], [0, 0]]), method="bbse")
    assert method.card_values()["confusion"] == [[pytest.approx(0.8), 0.0], [pytest.approx(0.2), 1.0]]


# --- ROID's prior correction ------------------------------------------------------------------------------------------


def roid_reference(p: np.ndarray) -> np.ndarray:
    images, classes = p.shape
    mean = p.mean(axis=0)
    s = max(1 / images, 1 / classes) / mean.max()
    joint = p * (mean + s) / (1 + s * classes)
    return joint / joint.sum(axis=1, keepdims=True)


def test_the_prior_correction_by_hand() -> None:
    """p = (0.8, 0.2), (0.4, 0.6): m = (0.6, 0.4), s = 0.5/0.6, weights 1.4333 : 1.2333."""
    by_hand = roid_reference(np.array([[0.8, 0.2], [0.4, 0.6]]))
    np.testing.assert_allclose(by_hand[:, 0], [0.82297, 0.43655], atol=1e-5)


@every_pool
@pytest.mark.parametrize("base", BASES)
def test_prior_roid_is_the_published_rule(own, base: str) -> None:
    method = ms.create_method("prior_roid", own(), base=base)
    for images, answer in zip(stream(), answers(method, stream()), strict=True):
        expected = roid_reference(softmax(observed(base, own(), images)[0]))
        np.testing.assert_allclose(answer, expected, rtol=1e-3, atol=1e-5)


# --- all of them ------------------------------------------------------------------------------------------------------

WRAPPERS = (
    "lame(mean, k=2)",
    "t3a(ensemble, supports=2)",
    "label_shift(mean, window=4)",
    "prior_roid",
    "corrected(mean)",
)


def created(text: str, of: ms.ExpertPool) -> ms.Method:
    (variant,) = parse_variants(text)
    return ms.create_method(variant.method, of, **dict(variant.options))


@pytest.mark.parametrize("text", WRAPPERS)
def test_padding_changes_nothing(text: str) -> None:
    method = created(text, pool())
    exact = inexact = method.start()
    for images in stream():
        step, exact = method.advance(Batch(pool().prepare(images)), exact)
        longer, inexact = method.advance(padded(pool(), images), inexact)
        torch.testing.assert_close(longer.logits[: len(images)], step.logits, rtol=1e-4, atol=1e-5)
        for one, other in zip(leaves(exact), leaves(inexact), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", ["lame", "t3a", "label_shift", "prior_roid"])
def test_a_step_touches_nothing_of_the_host(text: str) -> None:
    """On tensors that only claim to lie on a GPU: a CUDA graph can hold the step."""
    method: Any = created(text, pool())
    with FakeTensorMode(allow_non_fake_inputs=True):
        method.pool = pool()._with(bank=torch.empty(pool().bank.shape, device="cuda"))
        logits, features, home = (torch.empty(shape, device="cuda") for shape in ((4, 5), (4, 32), (5,)))
        method._home, method.last_layer_of = home, lambda _: (torch.empty(5, 32, device="cuda"), home)
        method._base = SimpleNamespace(advance=lambda _, state: (ms.Step(logits), state), start=State)
        method.answered = lambda batch, state: (*method._base.advance(batch, state.base), features)
        batch, state = (
            Batch(torch.empty(4, 3, 16, 16, device="cuda"), shares=torch.empty(4, device="cuda")),
            method.start(),
        )
        with HostTraffic() as traffic:
            method.advance(batch, state)
    assert traffic.seen == []


@pytest.mark.parametrize(
    ("text", "forwards"),
    [
        ("lame(mean)", (0, 1)),
        ("lame(ensemble)", (3, 1)),
        ("lame(ensemble(views=hflip))", (6, 1)),
        ("t3a(lame(ensemble))", (3, 1)),
        ("t3a(entropy_adaptive(views=()))", (3, 1)),
        ("t3a(single_expert(expert=brest))", (1, 1)),
        ("corrected(t3a(mean))", (0, 1)),
        ("label_shift(ensemble)", (3, 0)),
        ("prior_roid(merge_and_fit)", (6, 1)),
    ],
)
def test_features_come_from_the_forward_of_the_base(text: str, forwards: tuple[int, int]) -> None:
    step = created(text, pool()).step(make_images(3))
    assert (step.expert_forwards, step.merged_forwards) == forwards


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("lame(mean)", "lame"),
        ("lame(base=ensemble, k=5)", "lame(ensemble)"),
        ("lame(ensemble(views=hflip), k=3)", "lame(ensemble(views=(hflip)), k=3)"),
        ("t3a(lame(ensemble), supports=20)", "t3a(lame(ensemble), supports=20)"),
        ("corrected(ensemble)", "corrected(ensemble)"),
        (
            "label_shift(entropy_adaptive(momentum=0.9), window=8)",
            "label_shift(entropy_adaptive(momentum=0.9), window=8)",
        ),
        ("prior_roid(single_expert(expert=brest))", "prior_roid(single_expert(expert=brest))"),
    ],
)
def test_labels_are_spelt_as_on_the_command_line(text: str, label: str) -> None:
    method = created(text, pool())
    assert method.label() == label
    assert created(label, pool()).provenance == method.provenance


@pytest.mark.parametrize("base", [name for name in METHODS if not issubclass(METHODS[name], Wrapper)])
def test_any_method_can_be_a_base(base: str, vit_pool: ms.ExpertPool) -> None:
    """Two wrappers around it: what they take over from it is whole, and a stream resumes."""
    inner = f"{base}(expert=brest)" if base == "single_expert" else base
    plain, method = created(inner, vit_pool), created(f"t3a(lame({inner}, k=2))", vit_pool)
    assert (method.needs, method.period, method.takes_padding) == (plain.needs, plain.period, plain.takes_padding)
    assert method.source_hashes() == plain.source_hashes()
    assert method.wrapped()["wrapped"]["options"] == plain.options()
    first, second = make_images(3), make_images(1, seed=1)
    forwards = method.step(first).expert_forwards
    assert forwards == plain.step(first).expert_forwards
    resumed = created(method.label(), vit_pool)
    resumed.load_state_dict(method.state_dict())
    logits = method.step(second).logits
    assert torch.isfinite(logits).all()
    assert torch.equal(resumed.step(second).logits, logits)


def test_an_expert_that_leaves_takes_the_features_with_it() -> None:
    """The merged model is another then: prototypes and windows start anew."""
    method, rest = created("t3a(lame(mean))", pool()), pool().without("lyon")
    method.step(make_images(4))
    start = created("t3a(lame(mean))", rest).start()
    state = for_experts(method.state, pool().names, start, rest.names)
    assert state is not None
    assert torch.equal(state.entropy, start.entropy)
    assert not torch.equal(method.state.entropy, start.entropy)


def test_a_benchmark_checks_the_views_of_bases() -> None:
    upright = SimpleNamespace(name="upright", views=("brightness",))
    (plain,), (given,) = parse_variants("corrected"), parse_variants("lame(corrected(ensemble(views=hflip)))")
    assert method_of(plain, pool(), upright).asked_views() == ("brightness",)
    with pytest.raises(ms.MergestreamError, match="'hflip' does not keep the labels of 'upright' true"):
        method_of(given, pool(), upright)
    (inner,) = parse_variants("lame(entropy_adaptive)")
    assert method_of(inner, pool(), upright).label() == "lame(entropy_adaptive(views=(brightness)))"
    assert method_of(given, pool(), SimpleNamespace(name="any", views=("hflip",))).asked_views() == ("hflip",)


class NoBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = nn.Conv2d(3, 4, 4, stride=4), nn.Linear(4, len(CLASSES), bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.stem(images).mean(dim=(2, 3)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lame(k=-1)", "'k' is a whole number of at least 0"),
        ("t3a(supports=0)", "'supports' is a whole number of at least 1"),
        ("t3a(unit_prototypes=2)", "'unit_prototypes' is True or False"),
        ("label_shift(method=ml)", "choice for 'method'"),
        ("label_shift(window=0)", "'window' is a whole number of at least 1"),
        ("label_shift(home=(1, 2))", "one share for each of the 5 classes"),
        ("label_shift(method=bbse)", "confusion .* lyon, brest, turin"),
        ("lame(ties)", "'ties' needs the weights that all experts started from"),
        ("t3a(regmean)", "'regmean' needs statistics"),
        ("corrected(prior_roid)", "both correct for the mix of classes"),
        ("label_shift(lame(corrected))", "both correct for the mix of classes"),
        ("lame(t3a(lame))", "cannot be its own base"),
        ("corrected(lame(mean), anchor=experts)", "a base that asks the experts"),
    ],
)
def test_wrong_options_and_pools_are_refused(text: str, message: str) -> None:
    with pytest.raises(ms.MergestreamError, match=message):
        created(text, pool())


@pytest.mark.parametrize("name", ["lame", "t3a"])
def test_a_network_without_a_linear_end_is_refused(name: str) -> None:
    of = ms.ExpertPool.from_modules({expert: NoBias() for expert in NAMES}, classes=CLASSES)
    with pytest.raises(ms.MergestreamError, match="does not end in one linear layer with a bias"):
        ms.create_method(name, of)


def test_a_confusion_of_other_classes_is_refused() -> None:
    with pytest.raises(ms.MergestreamError, match="5 rows of 5"):
        ms.create_method("label_shift", with_confusion(pool(), [[1, 2], [3, 4]]), method="bbse")
