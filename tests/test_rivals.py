"""Rivals that adapt or merge at test time, against references written from their equations."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import mergestream as ms
from conftest import CLASSES, FACTORIES, PREPROCESSING, make_experts, make_images, make_pool, micro_vit
from mergestream.data.datasets.domain_data import DomainData
from mergestream.functional.clustering import k_means
from mergestream.methods.spelling import parse_variant
from mergestream.methods.state import to_plain
from mergestream.pool.runner import Batch

BATCHES = [make_images(size, seed=seed) for seed, size in enumerate((6, 6, 3, 5, 1, 6))]


def deep_vit(classes: int = len(CLASSES)) -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=32, depth=5, num_heads=2, num_classes=classes
    )


def two_class_vit() -> nn.Module:
    return deep_vit(classes=2)


class NoNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.fc = nn.Linear(8, len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(torch.relu(self.stem(images)).mean(dim=(2, 3)))


def pool_of(factory: Callable[[], nn.Module]) -> tuple[ms.ExpertPool, dict[str, nn.Module]]:
    experts = make_experts(factory)
    preprocessing = None if hasattr(next(iter(experts.values())), "patch_embed") else PREPROCESSING
    return ms.ExpertPool.from_modules(experts, preprocessing=preprocessing), experts


def averaged(experts: dict[str, nn.Module], shares: list[float] | np.ndarray) -> nn.Module:
    """The mean of state dicts, tensor by tensor."""
    merged = copy.deepcopy(next(iter(experts.values())))
    states = [module.state_dict() for module in experts.values()]
    with torch.no_grad():
        for name, tensor in merged.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(sum(float(c) * state[name] for c, state in zip(shares, states, strict=True)))
    return merged.eval()


def entropy_of(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


# --- TENT and SAR -----------------------------------------------------------------------------------------------------


@contextmanager
def as_published(network: nn.Module) -> Iterator[None]:
    """BatchNorm as TENT's own code has it: no running statistics."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    stored = [(layer.running_mean, layer.running_var) for layer in layers]
    for layer in layers:
        layer.running_mean = layer.running_var = None
    yield
    for layer, (mean, variance) in zip(layers, stored, strict=True):
        layer.running_mean, layer.running_var = mean, variance


def affine_of(network: nn.Module, inside: tuple[str, ...] = ("",)) -> list[nn.Parameter]:
    """Scales and shifts of the normalisation layers under some names; everything else is frozen."""
    network.requires_grad_(False)
    layers = [
        layer
        for name, layer in network.named_modules()
        if isinstance(layer, nn.BatchNorm2d | nn.LayerNorm) and name.startswith(inside)
    ]
    return [p.requires_grad_() for layer in layers for p in (layer.weight, layer.bias)]


def assert_same_parameters(method: ms.Method, network: nn.Module) -> None:
    views = method.pool.layout.views(method.merged_weights())
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(
            views[name], parameter.detach(), rtol=0, atol=1e-5, msg=lambda text, n=name: n + text
        )


@pytest.mark.parametrize("factory", [micro_vit, FACTORIES["resnet"], FACTORIES["hand_written"], two_class_vit])
@pytest.mark.parametrize("options", [{}, {"learning_rate": 2e-3, "momentum": 0.5}], ids=["published", "others"])
def test_tent_is_a_plain_loop_of_sgd(factory: Callable[[], nn.Module], options: dict) -> None:
    pool, experts = pool_of(factory)
    method, network = ms.create_method("tent", pool, **options), averaged(experts, [1 / 3] * 3)
    has_batch_norm = any(isinstance(layer, nn.BatchNorm2d) for layer in network.modules())
    rate = options.get("learning_rate", 2.5e-4 if has_batch_norm else 1e-3)
    optimiser = torch.optim.SGD(affine_of(network), lr=rate, momentum=options.get("momentum", 0.9))
    # A deep BatchNorm cannot normalise a single image of one pixel.
    for images in (batch for batch in BATCHES if len(batch) > 1 or not has_batch_norm):
        with as_published(network):
            optimiser.zero_grad()
            entropy_of(network(pool.prepare(images))).mean().backward()
            optimiser.step()
            answer = network(pool.prepare(images)).detach()
        step = method.step(images)
        # Statistics of three numbers are far more sensitive to rounding than the parameters.
        torch.testing.assert_close(step.logits, answer, rtol=1e-3, atol=1e-3)
        assert (step.expert_forwards, step.merged_forwards, step.backwards) == (0, 2, 1)
        assert_same_parameters(method, network)
    assert float(method.state.change.abs().max()) > 1e-5


def test_tent_can_use_the_experts_mean_statistics() -> None:
    pool, experts = pool_of(FACTORIES["resnet"])
    method = ms.create_method("tent", pool, recalibrate_bn=False)
    network = averaged(experts, [1 / 3] * 3)
    optimiser = torch.optim.SGD(affine_of(network), lr=2.5e-4, momentum=0.9)
    for images in BATCHES:
        optimiser.zero_grad()
        entropy_of(network(pool.prepare(images))).mean().backward()
        optimiser.step()
        torch.testing.assert_close(method(images), network(pool.prepare(images)).detach(), rtol=1e-4, atol=1e-4)
        assert_same_parameters(method, network)


def test_statistics_of_a_batch_leave_the_pool_and_the_buffers_alone() -> None:
    pool, _ = pool_of(FACTORIES["resnet"])
    expected = ms.create_method("mean", pool)(BATCHES[0])
    method = ms.create_method("tent", pool, learning_rate=0.0)
    with_batch = method(BATCHES[0])
    assert not torch.allclose(with_batch, expected, atol=1e-3)
    torch.testing.assert_close(ms.create_method("mean", pool)(BATCHES[0]), expected, rtol=0, atol=0)
    torch.testing.assert_close(ms.create_method("mean", pool).merged_weights(), method.merged_weights())


class SharpnessAware:
    """SAR's published loop on a network, with two calls of backward per batch."""

    def __init__(self, network: nn.Module, inside: tuple[str, ...], options: dict) -> None:
        self.network, self.options = network, options
        self.parameters = affine_of(network, inside)
        self.start = [p.detach().clone() for p in self.parameters]
        self.renew()

    def renew(self) -> None:
        with torch.no_grad():
            for parameter, start in zip(self.parameters, self.start, strict=True):
                parameter.copy_(start)
        self.optimiser = torch.optim.SGD(self.parameters, lr=self.options["learning_rate"], momentum=0.9)
        self.moving: float | None = None

    def __call__(self, images: Tensor) -> Tensor:
        first = entropy_of(self.network(images))
        limit = self.options["margin"] * math.log(self.network(images).shape[1])
        reliable = torch.where(first < limit)
        self.optimiser.zero_grad()
        first[reliable].mean().backward()
        gradients = [p.grad.clone() for p in self.parameters]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        before = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.add_(gradient * self.options["radius"] / (norm + 1e-12))
        self.optimiser.zero_grad()
        second = entropy_of(self.network(images))[reliable]
        loss = second[torch.where(second < limit)].mean()
        loss.backward()
        with torch.no_grad():
            for parameter, value in zip(self.parameters, before, strict=True):
                parameter.copy_(value)
        self.optimiser.step()
        if not math.isnan(loss.item()):
            self.moving = loss.item() if self.moving is None else 0.9 * self.moving + 0.1 * loss.item()
        if self.moving is not None and self.moving < self.options["reset_below"]:
            self.renew()
            self.renewals = getattr(self, "renewals", 0) + 1
        return self.network(images).detach()


ADAPTED_BLOCKS = {
    3: ("blocks.0.", "blocks.1."),
    1: tuple(f"blocks.{k}." for k in range(4)),
    0: ("",),
    9: ("blocks.0.",),
}


@pytest.mark.parametrize("factory", [deep_vit, two_class_vit])
@pytest.mark.parametrize(
    ("options", "renewals"),
    [
        ({"margin": 0.4, "reset_below": 0.0}, 0),
        ({"margin": 0.05, "reset_below": 0.0, "radius": 0.5, "learning_rate": 0.01}, 0),
        ({"margin": 0.8, "reset_below": 10.0, "frozen_blocks": 1}, 5),
        ({"margin": 0.8, "reset_below": 0.0, "frozen_blocks": 0}, 0),
        ({"margin": 1e-6, "frozen_blocks": 9}, 0),
    ],
)
def test_sar_is_its_published_loop(factory: Callable[[], nn.Module], options: dict, renewals: int) -> None:
    pool, experts = pool_of(factory)
    method, network = ms.create_method("sar", pool, **options), averaged(experts, [1 / 3] * 3)
    full = {"margin": 0.4, "radius": 0.05, "reset_below": 0.2, "learning_rate": 1e-3, **options}
    loop = SharpnessAware(network, ADAPTED_BLOCKS[options.get("frozen_blocks", 3)], full)
    for images in BATCHES:
        answer = loop(pool.prepare(images))
        step = method.step(images)
        torch.testing.assert_close(step.logits, answer, rtol=1e-4, atol=1e-4)
        assert (step.expert_forwards, step.merged_forwards, step.backwards) == (0, 3, 2)
        assert_same_parameters(method, network)
        assert float(method.state.loss) == pytest.approx(-1.0 if loop.moving is None else loop.moving, rel=1e-4)
    assert getattr(loop, "renewals", 0) >= renewals


def test_sar_counts_only_some_images_in_these_tests() -> None:
    """Otherwise the test above would not see a wrong limit."""
    pool, experts = pool_of(deep_vit)
    entropies = entropy_of(averaged(experts, [1 / 3] * 3)(pool.prepare(torch.cat(BATCHES)))) / math.log(len(CLASSES))
    assert 5 < int((entropies < 0.05).sum()) < len(entropies) - 5


@pytest.mark.parametrize("name", ["tent", "sar"])
def test_networks_without_normalisation_layers_are_refused(name: str) -> None:
    with pytest.raises(ms.MergestreamError, match=r"normalisation layers, and .* has none"):
        ms.create_method(name, pool_of(NoNorm)[0])


@pytest.mark.parametrize("name", ["tent", "sar"])
def test_momentum_and_adapted_parameters_are_the_state(name: str) -> None:
    options = {"margin": 2.0} if name == "sar" else {}
    method = ms.create_method(name, make_pool("vit"), learning_rate=0.02, **options)
    method(BATCHES[0])
    before, saved = method.state, method.state_dict()
    expected = method(BATCHES[1])
    assert set(to_plain(before)) == {"change", "velocity", "loss"}
    method.state = before  # as the service rolls a refused batch back
    assert torch.equal(method(BATCHES[1]), expected)
    other = ms.create_method(name, make_pool("vit"), learning_rate=0.02, **options)
    other.load_state_dict(saved)
    assert torch.equal(other(BATCHES[1]), expected)
    other.reset()
    assert not torch.equal(other(BATCHES[1]), expected)


def test_half_types_do_not_lose_small_steps() -> None:
    pool = make_pool("vit").to(dtype=torch.bfloat16)
    method = ms.create_method("tent", pool)
    for images in BATCHES:
        method(images)
    assert method.state.change.dtype == torch.float32
    assert float(method.state.change.abs().max()) < 2**-8  # less than bfloat16 can add to 1, and still there
    assert float(method.state.change.abs().max()) > 0


# --- DaWin ------------------------------------------------------------------------------------------------------------


def k_means_by_hand(points: np.ndarray, groups: int) -> np.ndarray:
    """Lloyd's algorithm from the farthest points, with loops."""

    def distance(a: np.ndarray, b: np.ndarray) -> float:
        return float(((a - b) ** 2).sum())

    starts = [max(points, key=lambda p: distance(p, points.mean(axis=0)))]
    while len(starts) < groups:
        starts.append(max(points, key=lambda p: min(distance(p, s) for s in starts)))
    centres, labels = list(starts), None
    while True:
        new = [min(range(groups), key=lambda g: distance(point, centres[g])) for point in points]
        if new == labels:
            return np.array(labels)
        labels = new
        for g in range(groups):
            own = [point for point, label in zip(points, labels, strict=True) if label == g]
            centres[g] = np.mean(own, axis=0) if own else centres[g]


@pytest.mark.parametrize("groups", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_k_means_by_hand(groups: int, seed: int) -> None:
    points = np.random.RandomState(seed).dirichlet(np.ones(3), size=17)
    labels = k_means(torch.from_numpy(points), groups).numpy()
    assert (labels == k_means_by_hand(points, groups)).all()
    assert len(set(labels)) == groups


def test_k_means_of_equal_points_and_of_one_point() -> None:
    assert k_means(torch.full((4, 3), 1 / 3), 3).tolist() == [0] * 4
    assert k_means(torch.tensor([[0.2, 0.8]]), 3).tolist() == [0]
    assert len(k_means(torch.tensor([[0.2, 0.8], [0.2, 0.8], [0.7, 0.3]]), 3).unique()) == 2


def lambdas_of(logits: np.ndarray, temperature: float) -> np.ndarray:
    """[K,B,C] -> [B,K]"""
    p = np.exp(logits / temperature) / np.exp(logits / temperature).sum(axis=2, keepdims=True)
    unnormalised = np.exp((p * np.log(p)).sum(axis=2))
    return (unnormalised / unnormalised.sum(axis=0)).T


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"groups": 2}, {"temperature": 2.0}])
@pytest.mark.parametrize("factory", [micro_vit, two_class_vit, FACTORIES["resnet"]])
def test_dawin_merges_one_model_per_group(factory: Callable[[], nn.Module], options: dict) -> None:
    pool, experts = pool_of(factory)
    method = ms.create_method("dawin", pool, **options)
    for images in (make_images(1), BATCHES[2], make_images(24, seed=9)):
        prepared, step = pool.prepare(images), method.step(images)
        logits = torch.stack([module(prepared) for module in experts.values()]).detach().double().numpy()
        lambdas = lambdas_of(logits, options.get("temperature", 1.0))
        labels = k_means_by_hand(lambdas, options.get("groups", 3))
        for group in set(labels):
            merged = averaged(experts, lambdas[labels == group].mean(axis=0))
            answer = merged(prepared[torch.from_numpy(labels == group)]).detach()
            torch.testing.assert_close(step.logits[labels == group], answer, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(step.encoder_coefficients, lambdas.mean(axis=0), atol=1e-5)
        assert (step.expert_forwards, step.merged_forwards) == (3, 1)
    assert len(set(labels)) == options.get("groups", 3)


@pytest.mark.parametrize("text", ["dawin(transductive=True)", "lame(dawin(transductive=True))"])
def test_transductive_dawin_groups_the_whole_target_before_the_stream(text: str) -> None:
    """As published: k-means over all images; each batch is answered by the models of those groups."""
    pool, experts = pool_of(micro_vit)
    variant = parse_variant(text)
    method = ms.create_method(variant.method, pool, **dict(variant.options))
    target = make_images(24, seed=9)
    prepared = pool.prepare(target)
    logits = torch.stack([module(prepared) for module in experts.values()]).detach().double().numpy()
    lambdas = lambdas_of(logits, 1.0)
    labels = k_means_by_hand(lambdas, 3)
    centres = np.stack([lambdas[labels == group].mean(axis=0) for group in range(3)])
    method.look_ahead(target)
    for batch in torch.arange(24).split(7):
        step = method.step(target[batch])
        if text.startswith("dawin"):
            for i, image in enumerate(batch.tolist()):
                answer = averaged(experts, centres[labels[image]])(prepared[image][None]).detach()
                torch.testing.assert_close(step.logits[i : i + 1], answer, rtol=1e-4, atol=1e-4)
    assert len(set(labels[:7])) > 1, "else batches would have the same groups"
    method.reset()
    with pytest.raises(ms.MergestreamError, match="look_ahead"):
        method.step(target[:4])


def test_an_evaluation_looks_ahead_and_goes_on_with_the_groups_it_had() -> None:
    pool, _ = pool_of(micro_vit)
    images = make_images(24, seed=9)
    labels = torch.arange(24) % len(pool.classes)
    data = DomainData("own", "here", pool.classes, images, labels)
    batches = [part.numpy() for part in torch.arange(24).split(7)]
    method = ms.create_method("dawin", pool, transductive=True)
    whole = ms.evaluate(method, data, batches)
    by_hand = ms.create_method("dawin", pool, transductive=True)
    by_hand.look_ahead(images)
    expected = torch.cat([by_hand.step(images[batch]).logits.softmax(dim=-1) for batch in batches])
    torch.testing.assert_close(whole.probabilities.float(), expected, rtol=1e-3, atol=1e-3)
    later = ms.create_method("dawin", pool, transductive=True)
    by_hand.reset()
    by_hand.look_ahead(images)
    later.load_state_dict(by_hand.state_dict())
    assert torch.equal(later.step(images[:5]).logits, by_hand.step(images[:5]).logits)


# --- merging and weighting by formulas --------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(("gamma", "temperature"), [(0.5, 1.0), (30.0, 1.0), (30.0, 3.0), (0.0, 1.0)])
@pytest.mark.parametrize("factory", [micro_vit, two_class_vit])
def test_t3_js_weighs_by_the_divergence_from_the_mean_answer(
    factory: Callable[[], nn.Module], gamma: float, temperature: float
) -> None:
    pool, experts = pool_of(factory)
    method = ms.create_method("t3_js", pool, gamma=gamma, temperature=temperature)
    for images in BATCHES:
        prepared, step = pool.prepare(images), method.step(images)
        p = softmax(torch.stack([m(prepared) for m in experts.values()]).detach().double().numpy() / temperature)
        mean = p.mean(axis=0)
        divergences = []
        for own in p:
            middle = (own + mean) / 2
            kl = [(each * np.log(each / middle)).sum(axis=1) for each in (own, mean)]
            divergences.append(np.mean(sum(kl) / 2))
        shares = np.exp(-gamma * np.array(divergences))
        shares /= shares.sum()
        np.testing.assert_allclose(step.encoder_coefficients, shares, atol=1e-5)
        np.testing.assert_allclose(step.scores, divergences, atol=1e-5)
        answer = averaged(experts, shares)(prepared).detach()
        torch.testing.assert_close(step.logits, answer, rtol=1e-4, atol=1e-4)
        assert (step.expert_forwards, step.merged_forwards) == (3, 1)


@pytest.mark.parametrize(("epsilon", "temperature"), [(1e-6, 5.0), (0.5, 1.0), (1e-3, 2.5)])
@pytest.mark.parametrize("factory", [micro_vit, two_class_vit])
def test_image_weights_are_inverse_entropies(
    factory: Callable[[], nn.Module], epsilon: float, temperature: float
) -> None:
    pool, experts = pool_of(factory)
    method = ms.create_method("image_weights", pool, epsilon=epsilon, temperature=temperature)
    for images in BATCHES:
        logits = torch.stack([m(pool.prepare(images)) for m in experts.values()]).detach().double().numpy()
        expected = np.zeros(logits.shape[1:])
        for b in range(len(images)):
            q = softmax(logits[:, b] / temperature)
            weights = 1 / (-(q * np.log(q)).sum(axis=1) + epsilon)
            expected[b] = sum(w * softmax(z) for w, z in zip(weights / weights.sum(), logits[:, b], strict=True))
        step = method.step(images)
        np.testing.assert_allclose(step.logits.exp(), expected, atol=1e-5)
        assert (step.expert_forwards, step.merged_forwards) == (3, 0)


def test_image_weights_answer_each_image_alone() -> None:
    method, images = ms.create_method("image_weights", make_pool("vit")), make_images(6)
    alone = torch.cat([method(image[None]) for image in images])
    torch.testing.assert_close(method(images), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("before", [32.0, 200.0])
@pytest.mark.parametrize("factory", [micro_vit, FACTORIES["resnet"], two_class_vit])
def test_surgery_is_ridge_regression_on_the_stream_so_far(factory: Callable[[], nn.Module], before: float) -> None:
    """argmin over the change V and the bias of sum ||(W+V)x + b - y||^2 + ridge ||V||^2."""
    pool, experts = pool_of(factory)
    method, network = ms.create_method("surgery", pool, before=before), averaged(experts, [1 / 3] * 3)
    last = network.get_classifier()
    weight = last.weight.detach().double().numpy()
    inputs: list[Tensor] = []
    last.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    targets: list[np.ndarray] = []
    for images in [make_images(24, seed=seed) for seed in range(4)] + BATCHES:
        prepared = pool.prepare(images)
        network(prepared)
        targets.append(torch.stack([m(prepared) for m in experts.values()]).detach().double().numpy().mean(axis=0))
        x, y = torch.cat(inputs).double().numpy(), np.concatenate(targets)
        centred, goal = x - x.mean(axis=0), y - y.mean(axis=0)
        ridge = before / len(x) * centred.var(axis=0).mean()
        gram = centred.T @ centred / len(x) + ridge * np.eye(x.shape[1])
        change = np.linalg.solve(gram, centred.T @ (goal - centred @ weight.T) / len(x)).T
        now = inputs[-1].double().numpy() - x.mean(axis=0)
        expected = now @ (weight + change).T + y.mean(axis=0)
        step = method.step(images)
        np.testing.assert_allclose(step.logits, expected, atol=2e-2 * np.abs(expected).max())
        assert (step.expert_forwards, step.merged_forwards) == (3, 1)
    answered = method.network()(prepared).detach()
    torch.testing.assert_close(answered, step.logits, rtol=1e-3, atol=1e-3)


class LateScale(nn.Module):
    """A network whose last layer does not write the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = NoNorm()
        self.fc = nn.Linear(len(CLASSES), len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return 3 * self.fc(self.body(images))


def test_surgery_refuses_networks_whose_last_layer_it_cannot_fit() -> None:
    method = ms.create_method("surgery", pool_of(LateScale)[0])
    with pytest.raises(ms.MergestreamError, match="does not end in one linear layer"):
        method(BATCHES[0])


@pytest.mark.parametrize("name", ["dawin", "t3_js", "image_weights", "surgery"])
def test_an_expert_has_no_say_on_a_class_that_it_never_saw(name: str) -> None:
    pool, images = make_pool("vit"), make_images(6)
    logits = pool.logits(images)
    noisy = logits.clone()
    noisy[1, :, 2] += torch.randn(6)
    lacking = pool.annotate("brest", class_counts=dict.fromkeys((*CLASSES[:2], *CLASSES[3:]), 9))
    for each, is_same in ((pool, False), (lacking, True)):
        methods = [ms.create_method(name, each) for _ in range(2)]
        answers = [
            method.step(images, expert_logits={"original": given}).logits
            for method, given in zip(methods, (logits, noisy), strict=True)
        ]
        assert torch.allclose(*answers, rtol=1e-5, atol=1e-5) == is_same
    assert methods[0].provenance["cards"]["seen_classes"][1] == [True, True, False, True, True]


@pytest.mark.parametrize(
    ("base", "forwards"), [("tent", 2), ("sar", 3), ("dawin", 5), ("t3_js", 4), ("image_weights", 4), ("surgery", 4)]
)
@pytest.mark.parametrize("wrapper", ["lame", "t3a", "corrected"])
def test_rivals_can_be_the_base_of_wrappers(wrapper: str, base: str, forwards: int) -> None:
    """Features are those of the answering forward; where there is not one for all images, of the mean's."""
    pool = make_pool("vit")
    method, alone = ms.create_method(wrapper, pool, base=base), ms.create_method(base, pool)
    extra = 1 if base in ("dawin", "image_weights") else 0
    for images in BATCHES:
        step, expected = method.step(images), alone.step(images)
        assert torch.isfinite(step.logits).all()
        total = step.expert_forwards + step.merged_forwards
        assert total == (forwards if wrapper != "corrected" else forwards - extra)
        if wrapper == "lame" and len(images) == 1:
            torch.testing.assert_close(step.logits.softmax(1), expected.logits.softmax(1), rtol=1e-4, atol=1e-5)


# --- the paper's rule on a part of each batch -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"score": "entropy_agreement", "views": ()}, {"momentum": 0.5}], ids=str)
@pytest.mark.parametrize("count", [1, 4])
def test_score_images_is_the_rule_on_those_images(count: int, options: dict) -> None:
    pool = make_pool("vit")
    part = ms.create_method("entropy_adaptive", pool, score_images=count, **options)
    rule = ms.create_method("entropy_adaptive", pool, **options)
    for images in BATCHES:
        step, expected = part.step(images), rule.step(images[:count])
        for name in ("encoder_coefficients", "head_coefficients", "entropy", "scores", "consistency"):
            mine, theirs = getattr(step, name), getattr(expected, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        merged = pool.network(step.encoder_coefficients, step.head_coefficients)
        torch.testing.assert_close(step.logits, merged(pool.prepare(images)).detach(), rtol=1e-5, atol=1e-5)
        experts = 3 * (1 + len(part.views)) * min(count, len(images)) / len(images)
        assert (step.expert_forwards, step.merged_forwards) == (pytest.approx(experts), 1)


def test_score_images_slices_expert_logits_that_are_given() -> None:
    pool, images = make_pool("vit"), make_images(6)
    method = ms.create_method("entropy_adaptive", pool, score_images=2)
    given = {view: pool.logits(images, None if view == "original" else view) for view in ("original", "hflip")}
    ran: list[int] = []
    for expert in map(pool.expert, range(len(pool))):
        expert.register_forward_pre_hook(lambda *_: ran.append(1))
    expected = method.step(images)
    assert len(ran) == 6  # three experts, two views
    for logits in given.values():
        logits[:, 2:] = torch.randn_like(logits[:, 2:])  # nobody may look at these
    step = method.step(images, expert_logits=given)
    assert len(ran) == 6
    torch.testing.assert_close(step.encoder_coefficients, expected.encoder_coefficients, rtol=1e-5, atol=1e-6)
    assert step.expert_forwards == expected.expert_forwards == 2
    whole = method.step(images, with_experts=True)
    assert whole.expert_logits is not None
    assert whole.expert_logits.shape[1] == 6


def test_score_images_of_a_padded_batch_are_those_that_count() -> None:
    images = make_images(4)
    batch = Batch(images.float(), shares=torch.tensor([0.5, 0.5, 0.0, 0.0]))
    assert batch.first(3).shares is not None
    assert batch.first(3).shares.tolist() == [0.5, 0.5, 0.0]
    assert batch.first(1).shares.tolist() == [1.0]
    assert batch.first(4) is batch


# --- heads that started apart -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["task_arithmetic", "ties", "adamerging"])
@pytest.mark.parametrize(
    ("start", "chosen"),
    [
        *(("independent", "zero"), ("independent_large", "zero")),
        *(("shared", "saved"), (None, "saved")),
    ],
)
def test_task_vectors_follow_the_cards(name: str, start: str | None, chosen: str) -> None:
    pool = make_pool("vit", base=True)
    for expert in pool.names:
        pool = pool.annotate(expert, recipe={} if start is None else {"head_init": start})
    by_cards, by_hand = (ms.create_method(name, pool, **options) for options in ({}, {"base_head": chosen}))
    assert torch.equal(by_cards(BATCHES[0]), by_hand(BATCHES[0]))
    assert by_cards.provenance["cards"] == {"base_head": chosen}
    assert "cards" not in by_hand.provenance
    other = ms.create_method(name, pool, base_head="zero" if chosen == "saved" else "saved")
    assert not torch.equal(other(BATCHES[0]), by_hand(BATCHES[0]))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("entropy_adaptive", {"score_images": -1}, "score_images"),
        ("entropy_adaptive", {"score_images": 2.5}, "score_images"),
        ("corrected", {"base": "entropy_adaptive(score_images=2)", "anchor": "experts"}, "asks the experts"),
        ("ties", {"base_head": "none"}, "base_head"),
        ("tent", {"learning_rate": "fast"}, "choice for 'learning_rate'"),
        ("tent", {"learning_rate": -1.0}, "learning_rate"),
        ("tent", {"momentum": 1.0}, "momentum"),
        ("tent", {"recalibrate_bn": 1}, "True or False"),
        ("sar", {"margin": 0.0}, "margin"),
        ("sar", {"radius": -0.1}, "radius"),
        ("sar", {"reset_below": -0.1}, "reset_below"),
        ("sar", {"frozen_blocks": -1}, "frozen_blocks"),
        ("dawin", {"groups": 0}, "groups"),
        ("dawin", {"transductive": 1}, "transductive"),
        ("t3_js", {"gamma": -0.5}, "gamma"),
        ("t3_js", {"temperature": 0.0}, "temperature"),
        ("image_weights", {"epsilon": 0.0}, "epsilon"),
        ("surgery", {"before": 0}, "before"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ms.MergestreamError, match=message):
        ms.create_method(name, make_pool("vit", base=True), **options)
