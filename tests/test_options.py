"""Every option of every method against the naive reference: an option that is ignored turns a test red."""

import math

import pytest
import torch
from torch import Tensor, nn

import mergestream as ms
from conftest import CLASSES, HandWritten, make_experts, make_images, make_pool
from mergestream.networks.preprocessing import BRIGHTNESS, IMAGENET_MEAN, IMAGENET_STD, VIEWS, views_for

MEAN, STD = IMAGENET_MEAN, IMAGENET_STD


def viewed(images: Tensor, view: str) -> Tensor:
    """Views by plain indexing and arithmetic on preprocessed images."""
    if view == "hflip":
        return images[:, :, :, torch.arange(images.shape[3] - 1, -1, -1)]
    if view == "vflip":
        return images[:, :, torch.arange(images.shape[2] - 1, -1, -1)]
    if view == "rot180":
        return torch.rot90(images, 2, (2, 3))
    if view == "transpose":
        return images.permute(0, 1, 3, 2).contiguous()
    channels = []
    for c in range(3):
        pixel = images[:, c] * STD[c] + MEAN[c]
        channels.append(((pixel * 1.15).clamp(0, 1) - MEAN[c]) / STD[c])
    return torch.stack(channels, dim=1)


@torch.no_grad()
def naive_step(experts: dict[str, nn.Module], images: Tensor, options: dict, old: tuple | None) -> dict:
    """Algorithm 1 with every option, in double precision where it matters, one expert at a time."""
    o = {
        "temperature": 1.0,
        "encoder": "adaptive",
        "head": "entropy_gap",
        "head_sharpness": 1.0,
        "momentum": 0.0,
        "views": ("hflip",),
        "score": "entropy",
        "weighting": "inverse",
        "encoder_sharpness": 1.0,
        "recalibrate_bn": False,
        "epsilon": 1e-6,
        **options,
    }
    k = len(experts)
    taus = o["temperature"] if isinstance(o["temperature"], list) else [o["temperature"]] * k
    energies, scores, consistencies = [], [], []
    for module, tau in zip(experts.values(), taus, strict=True):
        p = (module(images).double() / tau).softmax(-1)
        energies.append(float(-(p * p.log()).sum(-1).mean()))
        scores.append(energies[-1] if o["score"] == "entropy" else float(1 - p.max(-1).values.mean()))
        changes = [(module(viewed(images, v)).double() / tau).softmax(-1) for v in o["views"]]
        total = [float((1 - (q - p).abs().sum(-1) / 2).mean()) for q in changes]
        consistencies.append(sum(total) / len(total) if total else 0.0)
    if o["encoder"] == "uniform":
        a = [1 / k] * k
    elif o["weighting"] == "softmax":
        a = [math.exp(-o["encoder_sharpness"] * s) for s in scores]
    else:
        a = [1 / (s + o["epsilon"]) for s in scores]
    a = [x / sum(a) for x in a]
    ranking = [(1 + c) / (s + o["epsilon"]) for s, c in zip(scores, consistencies, strict=True)]
    star = ranking.index(max(ranking))
    if o["head"] == "shared":
        h = a
    elif o["head"] == "select":
        h = [float(j == star) for j in range(k)]
    else:
        h = [math.exp(-o["head_sharpness"] * abs(s - scores[star])) for s in scores]
        h = [x / sum(h) for x in h]
    if o["momentum"]:
        before = old or ([1 / k] * k, [1 / k] * k)
        a, h = (
            [o["momentum"] * p + (1 - o["momentum"]) * n for p, n in zip(past, new, strict=True)]
            for past, new in zip(before, (a, h), strict=True)
        )
    logits = naive_forward(list(experts.values()), a, h, images, o["recalibrate_bn"])
    return {"logits": logits, "a": a, "h": h, "entropy": energies, "scores": scores, "star": list(experts)[star]}


def naive_forward(
    experts: list[nn.Module], a: list[float], h: list[float], images: Tensor, recalibrate: bool
) -> Tensor:
    merged = HandWritten()
    state = {}
    for key, tensor in experts[0].state_dict().items():
        mix = h if key.startswith("fc.") else a
        values = [module.state_dict()[key] for module in experts]
        if tensor.is_floating_point():
            state[key] = sum(w * v.double() for w, v in zip(mix, values, strict=True)).float()
        else:
            state[key] = torch.stack(values).max()
    merged.load_state_dict(state)
    merged.eval()
    if recalibrate:
        merged.norm.momentum = 1.0  # running statistics become this batch's
        merged.norm.train()
        merged(images)
        merged.eval()
    return merged(images)


OPTIONS = [
    {"temperature": 2.5},
    {"temperature": [0.5, 1.0, 3.0]},
    {"epsilon": 0.5},
    {"encoder": "uniform"},
    {"head": "shared"},
    {"head": "select"},
    {"head_sharpness": 7.0},
    {"momentum": 0.8},
    {"views": ()},
    {"views": ("brightness",)},
    {"views": ("vflip", "rot180", "transpose")},
    {"score": "max_softmax"},
    {"weighting": "softmax"},
    {"weighting": "softmax", "encoder_sharpness": 6.0},
    {"recalibrate_bn": True},
]


@pytest.fixture(scope="module")
def experts() -> dict[str, nn.Module]:
    return make_experts(HandWritten, head_noise=0.7)


@pytest.fixture(scope="module")
def pool(experts: dict[str, nn.Module]) -> ms.ExpertPool:
    return ms.ExpertPool.from_modules(experts, classes=CLASSES, preprocessing=ms.Preprocessing((16, 16)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_option_of_entropy_adaptive_does_what_it_says(experts, pool: ms.ExpertPool, options: dict) -> None:
    method = ms.create_method("entropy_adaptive", pool, **options)
    plain = ms.create_method("entropy_adaptive", pool)
    old, changed = None, False
    for seed in range(3):
        images = pool.prepare(make_images(7, seed=seed))
        step = method.step(images)
        expected = naive_step(experts, images, options, old)
        old = expected["a"], expected["h"]
        close = {"rtol": 1e-3, "atol": 1e-5}
        torch.testing.assert_close(step.encoder_coefficients, torch.tensor(expected["a"]), **close)
        torch.testing.assert_close(step.head_coefficients, torch.tensor(expected["h"]), **close)
        torch.testing.assert_close(step.entropy, torch.tensor(expected["entropy"]), **close)
        torch.testing.assert_close(step.scores, torch.tensor(expected["scores"]), **close)
        torch.testing.assert_close(step.logits, expected["logits"], rtol=1e-3, atol=1e-3)
        assert step.head_expert == expected["star"]
        assert (step.consistency is None) == (options.get("views") == ())
        changed |= not torch.allclose(step.logits, plain.step(images).logits, rtol=1e-5, atol=1e-6)
    # Views act through the argmax of k* alone, so another view may change nothing.
    assert changed or "views" in options, "this option changed no answer: the comparison would not see it ignored"


def test_consistency_can_decide_the_head_expert() -> None:
    scores = torch.tensor([0.50, 0.52])
    star = ms.methods.entropy_adaptive.simplex.head_expert
    assert int(star(scores, None, 1e-6)) == 0
    assert int(star(scores, torch.tensor([0.5, 0.9]), 1e-6)) == 1


@pytest.mark.parametrize("view", list(VIEWS))
def test_views_against_plain_indexing(view: str) -> None:
    images = ms.Preprocessing((16, 16))(make_images())
    got = views_for(ms.Preprocessing((16, 16)))[view](images)
    torch.testing.assert_close(got, viewed(images, view), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, images)
    assert BRIGHTNESS == 1.15


@pytest.mark.parametrize("every", [1, 2, 3])
def test_refresh_every_scores_only_every_nth_batch(pool: ms.ExpertPool, monkeypatch, every: int) -> None:
    calls = []
    original = ms.ExpertPool.logits_of_views

    def counted(self, batch, views):
        calls.append(views)
        return original(self, batch, views)

    monkeypatch.setattr(ms.ExpertPool, "logits_of_views", counted)
    method = ms.create_method("entropy_adaptive", pool, refresh_every=every)
    steps = [method.step(make_images(seed=seed)) for seed in range(6)]
    assert calls == [("original", "hflip")] * len(range(0, 6, every))
    for number, step in enumerate(steps):
        scored = number % every == 0
        assert (step.entropy is not None) == scored
        if not scored:
            assert torch.equal(step.encoder_coefficients, steps[number - 1].encoder_coefficients)
            batch = make_images(seed=number)
            weights = pool.merge(step.encoder_coefficients, step.head_coefficients)
            assert torch.equal(step.logits, pool.forward(weights, batch))


def test_refresh_drift_scores_after_the_merged_models_entropy_moved(pool: ms.ExpertPool) -> None:
    batches = [make_images(seed=seed) for seed in (0, 0, 1, 1, 2)]  # a repeated batch does not drift
    method = ms.create_method("entropy_adaptive", pool, refresh_every=1000, refresh_drift=1e-4)
    steps = [method.step(batch) for batch in batches]
    entropies = [naive_entropy(step.logits) for step in steps]
    reference, drifted = entropies[0], False
    for number, step in enumerate(steps):
        scored = number == 0 or drifted
        assert (step.entropy is not None) == scored, number
        reference = entropies[number] if scored else reference
        drifted = abs(entropies[number] - reference) > 1e-4
    assert [step.entropy is not None for step in steps][:3] == [True, False, False]
    assert any(step.entropy is not None for step in steps[3:])
    never = ms.create_method("entropy_adaptive", pool, refresh_every=1000)
    assert [never.step(batch).entropy is not None for batch in batches] == [True] + [False] * 4


def naive_entropy(logits: torch.Tensor) -> float:
    p = torch.softmax(logits.double(), dim=-1)
    return float(-(p * p.log()).sum(dim=-1).mean())


@pytest.mark.parametrize("score", ["entropy", "max_softmax"])
def test_select_expert_takes_the_least_uncertain(experts, pool: ms.ExpertPool, score: str) -> None:
    method = ms.create_method("select_expert", pool, score=score)
    for seed in range(4):
        images = pool.prepare(make_images(3, seed=seed))
        step = method.step(images)
        expected = naive_step(experts, images, {"score": score}, None)["scores"]
        best = list(experts)[expected.index(min(expected))]
        assert step.head_expert == best
        with torch.no_grad():
            assert torch.equal(step.logits, experts[best](images))


def test_select_expert_settles_ties_by_name_not_by_position() -> None:
    saturated = make_experts(HandWritten, ("a", "b"))
    for module in saturated.values():
        module.fc.weight.data.mul_(1e6)
    images = make_images(3)
    answers = []
    for order in (saturated, dict(reversed(saturated.items()))):
        pool = ms.ExpertPool.from_modules(order, preprocessing=ms.Preprocessing((16, 16)))
        answers.append(ms.create_method("select_expert", pool)(images))
    assert torch.equal(*answers)


def test_ensemble_averages_logits_or_probabilities(experts, pool: ms.ExpertPool) -> None:
    images = pool.prepare(make_images())
    with torch.no_grad():
        z = torch.stack([module(images) for module in experts.values()])
    torch.testing.assert_close(ms.create_method("ensemble", pool)(images), z.mean(0))
    by_p = ms.create_method("ensemble", pool, average="probabilities")(images)
    torch.testing.assert_close(by_p.exp(), z.softmax(-1).mean(0))
    assert not torch.allclose(by_p.softmax(-1), z.mean(0).softmax(-1), atol=1e-3)


def test_mean_takes_numbers_and_sample_counts(experts, pool: ms.ExpertPool, tmp_path) -> None:
    from dataclasses import replace

    images = pool.prepare(make_images())
    shares = [0.7, 0.2, 0.1]
    expected = naive_forward(list(experts.values()), shares, shares, images, False)
    torch.testing.assert_close(
        ms.create_method("mean", pool, coefficients=shares)(images), expected, rtol=1e-4, atol=1e-4
    )
    counted = pool.without()
    counted.cards = tuple(
        replace(card, class_counts={"round": n, "ring": 10}) for card, n in zip(pool.cards, (60, 10, 0), strict=True)
    )
    step = ms.create_method("mean", counted, coefficients="samples").step(images)
    torch.testing.assert_close(step.encoder_coefficients, torch.tensor([0.7, 0.2, 0.1]))
    recalibrated = naive_forward(list(experts.values()), [1 / 3] * 3, [1 / 3] * 3, images, True)
    got = ms.create_method("mean", pool, recalibrate_bn=True)(images)
    torch.testing.assert_close(got, recalibrated, rtol=1e-4, atol=1e-4)


def test_recalibration_reaches_every_batchnorm_layer() -> None:
    """In a deep network the statistics of the merged model become those its own layers see."""
    pool = make_pool("resnet")
    weights = pool.merge([0.3, 0.3, 0.4])
    batch = pool.prepare(make_images(6, size=32))
    before = pool.forward(weights.clone(), batch)
    after = pool.forward(weights, batch, recalibrate_bn=True)
    assert not torch.allclose(before, after, atol=1e-2)
    module = pool.module_with(weights)
    seen: dict[str, Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, x, name=name: seen.__setitem__(name, x[0]))
        for name, layer in module.named_modules()
        if isinstance(layer, nn.BatchNorm2d)
    ]
    with torch.no_grad():
        module(batch)
    for handle in handles:
        handle.remove()
    assert len(seen) == 13
    for name, inputs in seen.items():
        layer = module.get_submodule(name)
        if inputs.shape[2] * inputs.shape[3] * len(inputs) > 1:
            torch.testing.assert_close(layer.running_mean, inputs.mean((0, 2, 3)), rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(layer.running_var, inputs.var((0, 2, 3)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("entropy_adaptive", {"momentum": "0.5"}),
        ("entropy_adaptive", {"momentum": True}),
        ("entropy_adaptive", {"views": None}),
        ("entropy_adaptive", {"views": [3]}),
        ("entropy_adaptive", {"temperature": None}),
        ("entropy_adaptive", {"temperature": "warm"}),
        ("entropy_adaptive", {"head_sharpness": math.inf}),
        ("entropy_adaptive", {"epsilon": math.nan}),
        ("entropy_adaptive", {"refresh_every": 1.5}),
        ("entropy_adaptive", {"recalibrate_bn": "no"}),
        ("mean", {"coefficients": None}),
        ("mean", {"recalibrate_bn": 1}),
    ],
)
def test_values_of_the_wrong_kind_are_refused(pool: ms.ExpertPool, name: str, options: dict) -> None:
    with pytest.raises(ms.MergestreamError):
        ms.create_method(name, pool, **options)


def test_a_step_hands_out_copies(pool: ms.ExpertPool) -> None:
    for name, options in (("entropy_adaptive", {"momentum": 0.5}), ("mean", {}), ("single_expert", {"expert": "lyon"})):
        method = ms.create_method(name, pool, **options)
        step = method.step(make_images())
        coefficients_before = method.step(make_images(seed=1)).encoder_coefficients.clone()
        method.reset()
        step = method.step(make_images())
        step.encoder_coefficients.zero_()
        step.head_coefficients.zero_()
        assert torch.equal(method.step(make_images(seed=1)).encoder_coefficients, coefficients_before)


def test_a_method_made_in_inference_mode_steps_outside_it(pool: ms.ExpertPool) -> None:
    with torch.inference_mode():
        method = ms.create_method("entropy_adaptive", pool, momentum=0.5)
        method.step(make_images())
    method.step(make_images())
