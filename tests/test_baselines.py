"""Every baseline against an independent reference on real networks: state dicts, loops, hooks and autograd only."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

import mergestream as ms
from conftest import CLASSES, NAMES, HandWritten, make_base, make_experts, make_images, micro_resnet, micro_vit
from mergestream.networks.blocks import Blocks, find_blocks
from mergestream.pool.statistics.fisher_information import FISHERS, _one_by_one
from mergestream.pool.statistics.grams import watch_inputs
from mergestream.pool.statistics.measurement import BlockwiseMerge

PREPROCESSING = ms.Preprocessing(size=(16, 16))
IMAGES = {name: make_images(8, seed=40 + k) for k, name in enumerate(NAMES)}


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=24, mlp_dim=40, num_classes=len(CLASSES)
    )


def hugging_face_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=40,
            image_size=16,
            patch_size=8,
            num_labels=len(CLASSES),
        )
    )


def hugging_face_resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic", num_labels=len(CLASSES))
    )


def torchvision_resnet() -> nn.Module:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=len(CLASSES))


def timm_resnetv2() -> nn.Module:
    return timm.create_model("resnetv2_18", layers=(1, 1), channels=(8, 12), num_classes=len(CLASSES))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "timm_vit": micro_vit,
    "timm_resnet": micro_resnet,
    "torchvision_vit": torchvision_vit,
    "hugging_face_vit": hugging_face_vit,
    "hugging_face_resnet": hugging_face_resnet,
    "hand_written": HandWritten,
}
every_network = pytest.mark.parametrize("network", list(NETWORKS))


def build(network: str) -> tuple[ms.ExpertPool, dict[str, nn.Module], nn.Module]:
    factory = NETWORKS[network]
    experts, base = make_experts(factory, head_noise=0.3), make_base(factory)
    pool = ms.ExpertPool.from_modules(experts, classes=CLASSES, base=base, preprocessing=PREPROCESSING)
    return pool, experts, base


def floats(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if value.is_floating_point()}


def weights_of(pool: ms.ExpertPool, name: str, **options) -> dict[str, Tensor]:
    views = pool.layout.views(ms.create_method(name, pool, **options).merged_weights())
    tied = {other: views[e.name] for e in pool.layout.entries for other in e.tied}
    return {**views, **tied}


def logits(module: nn.Module, batch: Tensor) -> Tensor:
    answer = module(batch)
    return answer if isinstance(answer, Tensor) else answer.logits


def is_buffer(module: nn.Module, key: str) -> bool:
    return key in dict(module.named_buffers(remove_duplicate=False))


def compare(ours: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5, atol: float = 1e-5) -> None:
    assert set(ours) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([state[key] for state in states]).mean(dim=0) for key in states[0]}


# --- task vectors -----------------------------------------------------------------------------------------


@every_network
@pytest.mark.parametrize(("option", "number"), [(0.3, 0.3), ("1/K", 1 / 3)])
def test_task_arithmetic(network: str, option: float | str, number: float) -> None:
    pool, experts, base = build(network)
    start, states = floats(base.state_dict()), [floats(module.state_dict()) for module in experts.values()]
    mean = mean_of(states)
    expected = {
        key: mean[key]
        if is_buffer(base, key)
        else start[key] + number * sum(state[key] - start[key] for state in states)
        for key in start
    }
    compare(weights_of(pool, "task_arithmetic", **{"lambda": option}), expected)


def test_task_arithmetic_on_a_zero_base_head() -> None:
    pool, experts, _ = build("timm_vit")
    ours = weights_of(pool, "task_arithmetic", base_head="zero")
    expected = 0.3 * sum(module.head.weight.detach() for module in experts.values())
    torch.testing.assert_close(ours["head.weight"], expected)


@every_network
@pytest.mark.parametrize("scope", ["global", "encoder_head_separately", "tensor"])
def test_ties_trims_parameters_only(network: str, scope: str) -> None:
    from test_merging import naive_ties

    pool, experts, base = build(network)
    tied = {other for entry in pool.layout.entries for other in entry.tied}
    names = sorted(key for key in dict(base.named_parameters(remove_duplicate=False)) if key not in tied)
    heads = tuple(f"{part}." for part in pool.template.head)
    groups = {
        "global": [names],
        "encoder_head_separately": [
            [n for n in names if not n.startswith(heads)],
            [n for n in names if n.startswith(heads)],
        ],
        "tensor": [[name] for name in names],
    }[scope]
    start, states = base.state_dict(), [module.state_dict() for module in experts.values()]
    expected = mean_of([floats(state) for state in states])
    for group in groups:
        flat = [torch.cat([state[name].flatten() for name in group]) for state in [start, *states]]
        # The majority is one for the whole network where nothing cancels exactly, as here.
        merged = naive_ties(flat[0], torch.stack(flat[1:]), 0.2, "mean", 0.3)
        for name, piece in zip(group, merged.split([start[n].numel() for n in group]), strict=True):
            expected[name] = piece.view(start[name].shape)
    for entry in pool.layout.entries:
        expected |= dict.fromkeys(entry.tied, expected[entry.name])
    compare(weights_of(pool, "ties", trim_scope=scope), expected)


def reference_adamerging(base, experts, batches, *, layer: bool, clamp: bool, rate: float, steps: int) -> list[Tensor]:
    """theta(lambda) as a graph over all K task vectors, differentiated by autograd."""
    start, names = dict(base.named_parameters()), list(dict(base.named_parameters()))
    tasks = [{n: dict(module.named_parameters())[n] - start[n] for n in names} for module in experts.values()]
    lambdas = nn.Parameter(torch.full((len(tasks), len(names)) if layer else (len(tasks), 1), 0.3))
    adam = torch.optim.Adam([lambdas], lr=rate)
    buffers = {
        k: v for k, v in mean_of([floats(m.state_dict()) for m in experts.values()]).items() if is_buffer(base, k)
    }

    def answer(batch: Tensor) -> Tensor:
        used = lambdas.clamp(0, 1) if clamp else lambdas
        weights = {
            name: (start[name] + sum(used[k, place if layer else 0] * task[name] for k, task in enumerate(tasks)))
            for place, name in enumerate(names)
        }
        answered = torch.func.functional_call(base, {**weights, **buffers}, (batch,))
        return answered if isinstance(answered, Tensor) else answered.logits

    results = []
    for batch in batches:
        for _ in range(steps):
            p = torch.softmax(answer(batch), dim=-1)
            loss = -(p * p.log()).sum(dim=-1).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        results.append(answer(batch).detach())
    return results


@every_network
@pytest.mark.parametrize("granularity", ["task", "layer"])
def test_adamerging_is_autograd_through_the_whole_graph(network: str, granularity: str) -> None:
    if network == "hand_written":
        pytest.skip("its tied layer hides from functional_call under two names; the gradient test below covers it")
    pool, experts, base = build(network)
    stream = [make_images(5, seed=70 + k) for k in range(4)]
    settings = {"clamp": True, "steps": 2}
    method = ms.create_method("adamerging", pool, granularity=granularity, learning_rate=0.02, **settings)
    expected = reference_adamerging(
        base, experts, [pool.prepare(batch) for batch in stream], layer=granularity == "layer", rate=0.02, **settings
    )
    for batch, answer in zip(stream, expected, strict=True):
        torch.testing.assert_close(method(batch), answer, rtol=2e-3, atol=2e-3)


@every_network
@pytest.mark.parametrize("head_rows", ["all", "seen"])
def test_the_gradient_of_lambda_is_that_of_finite_differences(network: str, head_rows: str) -> None:
    pool, _, _ = build(network)
    for k, name in enumerate(pool.names):  # each saw all classes but one
        pool = pool.annotate(name, class_counts={c: 1 for i, c in enumerate(CLASSES) if i != k})
    pool = pool.to(dtype=torch.float64)
    images = make_images(6, seed=80)
    method = ms.create_method("adamerging", pool, granularity="task", clamp=False, head_rows=head_rows)
    ours = method._gradient(pool.prepare(images), method.state)
    for k in range(len(pool)):
        ends = []
        for sign in (1, -1):
            moved = [0.3 + sign * 1e-4 * (j == k) for j in range(len(pool))]
            answer = ms.create_method("task_arithmetic", pool, head_rows=head_rows, **{"lambda": moved})(images)
            p = torch.softmax(answer.double(), dim=-1)
            ends.append(-(p * p.log()).sum(dim=-1).mean().item())
        assert ours[k].item() == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=2e-2, abs=2e-4)


def test_a_clamped_lambda_must_start_within_the_interval() -> None:
    """Outside it has no gradient, as published, and would never move."""
    pool, _, _ = build("timm_vit")
    for start in (-0.5, 1.5):
        with pytest.raises(ms.MergestreamError, match=r"starts within \[0, 1\]"):
            ms.create_method("adamerging", pool, **{"lambda": start})
    hasty = ms.create_method("adamerging", pool, learning_rate=2.0)
    used = hasty.step(make_images(6)).lambdas
    raw = hasty.state_dict()["state"]["lambdas"]
    assert torch.equal(used, raw.clamp(0, 1))
    assert not torch.equal(used, raw)
    free = ms.create_method("adamerging", pool, clamp=False, **{"lambda": -0.5})
    free.step(make_images(6))
    assert not torch.equal(free.state_dict()["state"]["lambdas"], torch.full((3,), -0.5))


def test_adamerging_lowers_the_entropy_of_the_batch_it_adapts_to() -> None:
    pool, _, _ = build("timm_vit")
    images = make_images(16, seed=9)
    before = ms.create_method("task_arithmetic", pool)(images)
    after = ms.create_method("adamerging", pool, learning_rate=0.02, steps=20)(images)
    entropies = [torch.special.entr(torch.softmax(each, dim=-1)).sum(dim=-1).mean().item() for each in (before, after)]
    assert entropies[1] < entropies[0] - 0.01


# --- Fisher -----------------------------------------------------------------------------------------------


def reference_fisher(module: nn.Module, batches: list[Tensor], kind: str) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters())
    total = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for batch in batches:
        if kind == "mergelm":
            log_p = torch.log_softmax(logits(module, batch), dim=-1)
            value = (log_p.exp().detach().sqrt() * log_p).sum()
            results = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, results, strict=True):
                total[name] += 0 if gradient is None else gradient**2
            continue
        for image in batch:
            for c in range(len(CLASSES)):
                log_p = torch.log_softmax(logits(module, image[None])[0], dim=-1)[c]
                results = torch.autograd.grad(log_p, list(parameters.values()), allow_unused=True)
                for name, gradient in zip(parameters, results, strict=True):
                    total[name] += 0 if gradient is None else log_p.exp().item() * gradient**2
    count = sum(map(len, batches))
    return {name: value / count for name, value in total.items()}


@every_network
@pytest.mark.parametrize("kind", list(FISHERS))
def test_fisher(network: str, kind: str) -> None:
    pool, experts, _ = build(network)
    pool = ms.measure_statistics(pool, IMAGES, [f"fisher_{kind}"], batch_size=3)
    results = [
        reference_fisher(module.requires_grad_(True), list(pool.prepare(IMAGES[name]).split(3)), kind)
        for name, module in experts.items()
    ]
    norms = [torch.cat([value.flatten() for value in each.values()]).norm() for each in results]
    root = sum(value.numel() for value in results[0].values()) ** 0.5
    scales = [1 / (norm + 1e-6) for norm in norms] if kind == "mergelm" else [root / norm for norm in norms]
    states = [floats(module.state_dict()) for module in experts.values()]
    expected = mean_of(states)
    for name in results[0]:
        information = [each[name] for each in results]
        if not any(bool(each.any()) for each in information):
            continue
        if kind == "mergelm":
            shares = [s * (f + 1e-6) for s, f in zip(scales, information, strict=True)]
        else:
            shares = [(s * f).clamp(min=1e-6) for s, f in zip(scales, information, strict=True)]
        expected[name] = sum(s * state[name] for s, state in zip(shares, states, strict=True)) / sum(shares)
    for entry in pool.layout.entries:
        expected |= dict.fromkeys(entry.tied, expected[entry.name])
    compare({k: v.detach() for k, v in weights_of(pool, "fisher", fisher=kind).items()},
            {k: v.detach() for k, v in expected.items()}, rtol=2e-3, atol=2e-4)  # fmt: skip


def test_exact_information_is_the_same_vectorised_and_one_by_one() -> None:
    pool, _, _ = build("timm_vit")
    batch = pool.prepare(make_images(5))
    views = pool.layout.views(pool.bank[0])
    weights = {entry.name: views[entry.name].clone().requires_grad_() for entry in pool.layout.parameters}
    module = pool.expert(0)
    answer = lambda own, batch, **_: pool.layout.call(module, own, batch)  # noqa: E731
    slow = _one_by_one(answer, batch, weights)
    fast = FISHERS["exact"](answer, batch, weights)
    for name, value in slow.items():
        torch.testing.assert_close(fast[name], value, rtol=1e-3, atol=1e-6)


def test_a_network_that_cannot_be_vectorised_is_measured_one_by_one() -> None:
    class Branching(HandWritten):
        def forward(self, images: Tensor) -> Tensor:
            scale = 1.0 if float(images.mean()) > 0 else 0.5  # a number read back: vmap refuses
            return super().forward(images) * scale

    experts = make_experts(Branching, head_noise=0.3)
    pool = ms.ExpertPool.from_modules(experts, classes=CLASSES, preprocessing=PREPROCESSING)
    pool = ms.measure_statistics(pool, {"lyon": IMAGES["lyon"]}, ["fisher_exact"])
    module = experts["lyon"].requires_grad_(True)
    expected = reference_fisher(module, [pool.prepare(IMAGES["lyon"])], "exact")
    own = pool.statistics[0]
    for name, value in own.of("fisher_exact"):
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("statistics", ["source", "target"])
@pytest.mark.parametrize("kind", list(FISHERS))
def test_an_expert_that_is_certain_of_everything_breaks_nothing(kind: str, statistics: str) -> None:
    """Its information is 0 everywhere."""
    experts = make_experts(micro_vit, head_noise=0.1)
    with torch.no_grad():
        experts["brest"].head.bias[0] += 500
    pool = ms.ExpertPool.from_modules(experts, classes=CLASSES)
    pool = ms.measure_statistics(pool, IMAGES, [f"fisher_{kind}"])
    method = ms.create_method("fisher", pool, fisher=kind, statistics=statistics)
    assert torch.isfinite(method(make_images(3))).all()
    assert torch.isfinite(method.merged_weights()).all()


def test_options_of_fisher() -> None:
    """Against the formula: without normalising, and with a floor that matters."""
    pool, _, _ = build("timm_vit")
    pool = ms.measure_statistics(pool, IMAGES, ["fisher_exact"])
    information = torch.stack([dict(own.of("fisher_exact"))["head.weight"] for own in pool.statistics]).double()
    values = torch.stack([pool.layout.views(row)["head.weight"] for row in pool.bank]).double()
    every = [torch.cat([value.flatten() for _, value in own.of("fisher_exact")]).double() for own in pool.statistics]
    for normalise in (True, False):
        for floor in (1e-6, 10.0):
            scales = [1 / each.square().mean().sqrt() if normalise else torch.tensor(1.0) for each in every]
            weights = (information * torch.stack(scales).view(-1, 1, 1)).clamp(min=floor)
            expected = (weights * values).sum(dim=0) / weights.sum(dim=0)
            ours = weights_of(pool, "fisher", normalise=normalise, floor=floor)["head.weight"]
            torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mean", {}),
        ("ties", {}),
        ("adamerging", {"learning_rate": 0.05}),
        ("fisher", {"statistics": "target"}),
        ("regmean", {"statistics": "target"}),
        ("regmean_pp", {"statistics": "target"}),
    ],
)
def test_recalibration_is_one_more_forward_on_the_model_merged_without_it(name: str, options: dict) -> None:
    pool, _, _ = build("timm_resnet")
    plain = ms.create_method(name, pool, **options)
    recalibrated = ms.create_method(name, pool, recalibrate_bn=True, **options)
    for seed in range(3):
        batch = make_images(5, seed=seed)
        untouched = plain(batch)
        expected = pool.forward(plain.merged_weights().clone(), batch, recalibrate_bn=True)
        assert torch.equal(recalibrated(batch), expected)
        assert not torch.allclose(untouched, expected, atol=1e-2)


def test_fisher_of_a_double_pool_is_computed_in_double() -> None:
    experts = {"a": make_base(micro_vit).double()}
    with torch.no_grad():
        experts["a"].head.bias.add_(1e-12)
    pool = ms.ExpertPool.from_modules(experts, classes=CLASSES)
    assert torch.equal(ms.create_method("fisher", pool, statistics="target").merged_weights(), pool.bank[0])


@pytest.mark.parametrize("name", ["task_arithmetic", "ties", "adamerging"])
def test_a_zero_base_head_is_that_of_a_base_whose_head_is_zero(name: str) -> None:
    experts, base = make_experts(micro_vit, head_noise=0.3), make_base(micro_vit)
    options = {"learning_rate": 0.05} if name == "adamerging" else {}
    saved = ms.ExpertPool.from_modules(experts, base=base)
    zero_headed = ms.create_method(name, saved, base_head="zero", **options)
    with torch.no_grad():
        base.head.weight.zero_()
        base.head.bias.zero_()
    zeroed = ms.create_method(name, ms.ExpertPool.from_modules(experts, base=base), **options)
    for seed in range(2):
        assert torch.equal(zero_headed(make_images(4, seed=seed)), zeroed(make_images(4, seed=seed)))
    assert not torch.equal(zero_headed(make_images(4)), ms.create_method(name, saved, **options)(make_images(4)))


@pytest.mark.parametrize("network", ["timm_vit", "timm_resnet"])
def test_regmean_pp_on_the_target_remembers_earlier_batches(network: str) -> None:
    """Two batches: the second one's Gram matrices join the first one's, block by block, with these options."""
    pool, _, _ = build(network)
    options = {"ratio": 0.8, "ridge": 0.05, "convolutions": network == "timm_resnet"}
    batches = [make_images(5, seed=1), make_images(3, seed=2)]
    method = ms.create_method("regmean_pp", pool, statistics="target", **options)
    for batch in batches:
        method.step(batch)
    earlier_grams = None
    for batch in batches:
        out = pool.new_weights()
        merge = BlockwiseMerge(pool, [[pool.prepare(batch)]], options, earlier=earlier_grams, out=out)
        earlier_grams = merge.run()
    torch.testing.assert_close(method.merged_weights(), out, rtol=1e-4, atol=1e-5)
    counts = {gram.rows for own in earlier_grams for gram in own.values()}
    fresh = BlockwiseMerge(pool, [[pool.prepare(batches[1])]], options).run()
    assert counts != {gram.rows for own in fresh for gram in own.values()}
    assert not torch.allclose(method.merged_weights(), weights_after(pool, batches[1:], options), atol=1e-4)


def weights_after(pool: ms.ExpertPool, batches: list[Tensor], options: dict) -> Tensor:
    method = ms.create_method("regmean_pp", pool, statistics="target", **options)
    for batch in batches:
        method.step(batch)
    return method.merged_weights()


def test_fisher_before_the_first_batch_is_the_mean() -> None:
    pool, _, _ = build("timm_vit")
    method = ms.create_method("fisher", pool, statistics="target")
    torch.testing.assert_close(method.merged_weights(), ms.create_method("mean", pool).merged_weights())
    method.step(make_images(3))
    method.reset()
    torch.testing.assert_close(method.merged_weights(), ms.create_method("mean", pool).merged_weights())


def test_a_pool_built_in_inference_mode_has_gradients_too() -> None:
    with torch.inference_mode():
        pool, _, _ = build("timm_vit")
        assert pool.base is not None
    for name, options in (("fisher", {"statistics": "target"}), ("adamerging", {})):
        assert torch.isfinite(ms.create_method(name, pool, **options)(make_images(2))).all()


@pytest.mark.parametrize("scope", ["global", "encoder_head_separately", "tensor"])
def test_padding_between_tensors_stays_zero(scope: str) -> None:
    pool, _, _ = build("hand_written")
    weights = ms.create_method("ties", pool, trim_scope=scope).merged_weights()
    for entry in pool.layout.entries:
        assert not weights[entry.stop : entry.end].any()


def test_mergelm_depends_on_the_batch_size_and_exact_does_not() -> None:
    pool, _, _ = build("timm_vit")
    results = {}
    for kind in FISHERS:
        for size in (2, 8):
            own = ms.measure_statistics(pool, {"lyon": IMAGES["lyon"]}, [f"fisher_{kind}"], batch_size=size)
            results[kind, size] = dict(own.statistics[0].of(f"fisher_{kind}"))["head.weight"]
    torch.testing.assert_close(results["exact", 2], results["exact", 8], rtol=1e-3, atol=1e-6)
    assert not torch.allclose(results["mergelm", 2], results["mergelm", 8], rtol=0.1)


# --- RegMean ----------------------------------------------------------------------------------------------


def reference_grams(module: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """By hooks; torch's own attention, which calls no Linear, is computed by hand."""
    results: dict[str, tuple[Tensor, int]] = {}

    def add(name: str, rows: Tensor) -> None:
        total, count = results.get(name, (torch.zeros(()), 0))
        results[name] = total + rows.transpose(-1, -2) @ rows, count + rows.shape[1]

    def hook(name: str) -> Callable:
        def look(layer: nn.Module, inputs: tuple) -> None:
            x = inputs[0].detach()
            if isinstance(layer, nn.MultiheadAttention):
                add(f"{name}.in_proj_weight", x.reshape(1, -1, x.shape[-1]))
                q, k, v = functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, dim=-1)
                split = [t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in (q, k, v)]
                scores = split[0] @ split[1].transpose(-1, -2) / split[0].shape[-1] ** 0.5
                heads = (torch.softmax(scores, dim=-1) @ split[2]).transpose(1, 2).flatten(2)
                add(f"{name}.out_proj.weight", heads.reshape(1, -1, heads.shape[-1]))
            elif isinstance(layer, nn.Conv2d):
                windows = functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
                add(f"{name}.weight", windows.transpose(1, 2).reshape(1, -1, windows.shape[1]))
            else:
                add(f"{name}.weight", x.reshape(1, -1, x.shape[-1]))

        return look

    handles = [
        layer.register_forward_pre_hook(hook(name))
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.MultiheadAttention) and not name.endswith("out_proj")
    ]
    with torch.enable_grad():  # keeps torch's attention off its fused inference path
        module(batch)
    for handle in handles:
        handle.remove()
    return {name: total.detach() / count for name, (total, count) in results.items()}


@every_network
@pytest.mark.parametrize("inference", [False, True])
def test_gram_matrices_are_those_of_hooks(network: str, inference: bool) -> None:
    pool, experts, _ = build(network)
    with torch.inference_mode(inference):
        pool = ms.measure_statistics(pool, IMAGES, ["gram"], batch_size=3)
    for name, module in experts.items():
        expected = reference_grams(module, pool.prepare(IMAGES[name]))
        own = dict(pool.statistics[pool.index(name)].of("gram"))
        assert set(own) == set(expected)
        for key, gram in expected.items():
            torch.testing.assert_close(own[key], gram, rtol=2e-4, atol=2e-4, msg=lambda text, key=key: f"{key}: {text}")


@every_network
def test_regmean_solves_every_layer(network: str) -> None:
    pool, experts, _ = build(network)
    pool = ms.measure_statistics(pool, IMAGES, ["gram"])
    states = [floats(module.state_dict()) for module in experts.values()]
    grams = [reference_grams(module, pool.prepare(IMAGES[name])) for name, module in experts.items()]
    expected = mean_of(states)
    for name in grams[0]:
        shrunk = [0.9 * g[name][0] + 0.1 * torch.diag(g[name][0].diag()) for g in grams]
        shrunk = [(g + 0.05 * torch.eye(len(g))).double() for g in shrunk]
        right = sum(g @ state[name].flatten(1).double().T for g, state in zip(shrunk, states, strict=True))
        expected[name] = torch.linalg.solve(sum(shrunk), right).T.reshape(states[0][name].shape).float()
    for entry in pool.layout.entries:
        expected |= dict.fromkeys(entry.tied, expected[entry.name])
    compare(weights_of(pool, "regmean", ratio=0.9, ridge=0.05), expected, rtol=1e-3, atol=1e-3)


def test_published_regmean_leaves_convolutions_to_the_mean() -> None:
    pool, experts, _ = build("timm_vit")
    pool = ms.measure_statistics(pool, IMAGES, ["gram"])
    mean = mean_of([floats(module.state_dict()) for module in experts.values()])
    published, ours = weights_of(pool, "regmean", convolutions=False), weights_of(pool, "regmean")
    torch.testing.assert_close(published["patch_embed.proj.weight"], mean["patch_embed.proj.weight"])
    assert not torch.allclose(ours["patch_embed.proj.weight"], mean["patch_embed.proj.weight"], atol=1e-3)
    torch.testing.assert_close(published["blocks.0.attn.qkv.weight"], ours["blocks.0.attn.qkv.weight"])


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.Conv2d(4, 6, (3, 2), dilation=(2, 1), padding=(2, 0)),
        nn.Conv2d(4, 8, 3, padding="same", groups=2),
        nn.Conv2d(4, 4, 3, padding="same", groups=4, dilation=2),
        nn.Conv2d(4, 6, 2, stride=2, padding="valid"),
        nn.Conv1d(4, 6, 3, padding=1),
        nn.Conv3d(4, 6, (1, 2, 3), padding=(0, 1, 1)),
    ],
    ids=str,
)
def test_a_convolution_is_its_windows_times_its_weight(layer: nn.Module) -> None:
    """The rows behind the Gram matrix, times the weight, are the convolution's own answer."""
    from mergestream.pool.statistics.grams import convolution_inputs

    torch.manual_seed(0)
    x = torch.randn(3, 4, *[6, 7, 5][: layer.weight.ndim - 2])
    settings = (layer.stride, layer.padding, layer.dilation)
    rows = torch.cat(list(convolution_inputs(layer.weight, x, layer.weight, None, *settings, layer.groups)), 1)
    matrices = layer.weight.reshape(layer.groups, -1, rows.shape[-1])
    answers = rows @ matrices.transpose(-1, -2)  # [groups, windows, out/groups]
    expected = (layer(x) - layer.bias.view(1, -1, *[1] * (x.ndim - 2))).movedim(1, -1).reshape(-1, layer.out_channels)
    torch.testing.assert_close(answers.permute(1, 0, 2).reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)
    with watch_inputs({"weight": layer.weight}) as grams:
        layer(x)
    torch.testing.assert_close(grams["weight"].mean, rows.transpose(-1, -2) @ rows / rows.shape[1])


def test_a_product_is_recognised_however_it_is_written() -> None:
    torch.manual_seed(0)
    weight, square, x = torch.randn(5, 3), torch.randn(3, 3), torch.randn(2, 4, 3)
    expected = torch.einsum("bni,bnj->ij", x, x) / 8
    for product in (
        lambda: functional.linear(x, weight),
        lambda: functional.linear(x, weight, torch.ones(5)),
        lambda: x @ weight.T,
        lambda: x.transpose(0, 1) @ weight.T,
        lambda: torch.bmm(x, weight.T.expand(2, 3, 5)),
    ):
        with watch_inputs({"weight": weight}) as grams:
            product()
        torch.testing.assert_close(grams["weight"].mean[0], expected)
    with watch_inputs({"square": square}) as grams:
        x @ square  # another map, whose inputs meet the other side of the matrix
    assert not grams


def test_watching_leaves_torch_as_it_was() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(RuntimeError), watch_inputs({}):
        raise RuntimeError
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_large_convolutions_are_unfolded_a_few_images_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(7, 3, 8, 8)
    with watch_inputs({"weight": layer.weight}) as at_once:
        layer(x)
    monkeypatch.setattr("mergestream.pool.statistics.grams.UNFOLDED", 1)
    with watch_inputs({"weight": layer.weight}) as in_parts:
        layer(x)
    torch.testing.assert_close(at_once["weight"].mean, in_parts["weight"].mean)
    assert at_once["weight"].rows == in_parts["weight"].rows == 7 * 36


def test_target_statistics_are_those_of_the_stream_so_far() -> None:
    pool, _, _ = build("timm_vit")
    stream = [make_images(5, seed=90), make_images(3, seed=91), make_images(4, seed=92)]
    for name, kind, options in (
        ("regmean", "gram", {}),
        ("fisher", "fisher_exact", {}),
        ("fisher", "fisher_mergelm", {"fisher": "mergelm"}),
    ):
        online = ms.create_method(name, pool, statistics="target", examples=8, **options)
        for t, batch in enumerate(stream):
            answer = online(batch)
            # Eight images are two batches: the third finds the model settled.
            seen = stream[: min(t + 1, 2)]
            shipped = ms.measure_statistics(
                pool,
                dict.fromkeys(pool.names, torch.cat(seen)),
                [kind],
                batch_size=1000 if kind != "fisher_mergelm" else 5,
            )
            expected = ms.create_method(name, shipped, **options)(batch)
            torch.testing.assert_close(answer, expected, rtol=2e-3, atol=2e-3)


# --- RegMean++ --------------------------------------------------------------------------------------------


def test_regmean_pp_walks_the_blocks() -> None:
    """Block by block over a timm ViT, written out with state dicts and hooks."""
    pool, experts, _ = build("timm_vit")
    shipped = ms.measure_statistics(pool, IMAGES, ["gram_pp"], ridge=0.05)
    ours = weights_of(shipped, "regmean_pp", ridge=0.05)
    states = [floats(module.state_dict()) for module in experts.values()]
    merged = make_base(micro_vit)
    merged.load_state_dict(mean_of(states))

    def solve(name: str, grams: list[Tensor]) -> None:
        damped = [(g[0] + 0.05 * torch.eye(g.shape[-1])).double() for g in grams]
        right = sum(g @ state[name].flatten(1).double().T for g, state in zip(damped, states, strict=True))
        merged.get_parameter(name).data.copy_(torch.linalg.solve(sum(damped), right).T)

    with torch.no_grad():
        flow = {
            name: merged.norm_pre(merged._pos_embed(merged.patch_embed(pool.prepare(IMAGES[name])))) for name in NAMES
        }
        for block in range(2):
            grams = [reference_grams(experts[name].blocks[block], flow[name]) for name in NAMES]
            for key in grams[0]:
                solve(f"blocks.{block}.{key}", [g[key] for g in grams])
            flow = {name: merged.blocks[block](x) for name, x in flow.items()}
        features = {name: merged.forward_head(merged.norm(x), pre_logits=True) for name, x in flow.items()}
        solve("head.weight", [(f.T @ f / len(f))[None] for f in features.values()])
    compare(ours, merged.state_dict(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("factory", "blocks"),
    [
        (micro_vit, ["blocks.0", "blocks.1"]),
        (torchvision_vit, ["encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"]),
        (hugging_face_vit, None),
        (micro_resnet, ["layer1.0", "layer2.0", "layer3.0", "layer4.0"]),
        (torchvision_resnet, ["layer1.0", "layer2.0", "layer3.0", "layer4.0"]),
        (timm_resnetv2, ["stages.0.blocks.0", "stages.1.blocks.0"]),
        (hugging_face_resnet, None),
    ],
)
def test_blocks_run_one_by_one_give_the_network(factory: Callable, blocks: list[str] | None) -> None:
    module = make_base(factory)
    taken = Blocks(module)
    assert blocks is None or taken.names == blocks
    assert len(taken) >= 2
    batch = torch.randn(3, 3, 32 if "resnet" in factory.__name__ else 16, 32 if "resnet" in factory.__name__ else 16)
    answers: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, __, output: answers.append(getattr(output, "logits", output)))
    with torch.no_grad():
        expected = logits(module, batch)
        call = taken.call_of(0, batch)
        for block in range(len(taken) - 1):
            call = taken.next_call(block, call, batch)
        answers.clear()
        taken.finish(call, batch)
        assert torch.equal(answers[0], expected)
        handle.remove()
        assert torch.equal(logits(module, batch), expected)  # nothing is left behind


@pytest.mark.parametrize("network", [n for n in NETWORKS if n != "hand_written"])
@pytest.mark.parametrize("statistics", ["source", "target"])
def test_regmean_pp_serves_every_known_family(network: str, statistics: str) -> None:
    pool, experts, _ = build(network)
    if statistics == "source":
        pool = ms.measure_statistics(pool, IMAGES, ["gram_pp"])
    method = ms.create_method("regmean_pp", pool, statistics=statistics)
    assert torch.isfinite(method(make_images(4))).all()
    ours, mean = pool.layout.views(method.merged_weights()), mean_of([floats(m.state_dict()) for m in experts.values()])
    inside = tuple(f"{block}." for block in find_blocks(pool.template.module))
    matrices = [e.name for e in pool.layout.parameters if len(e.shape) > 1 and e.name.startswith(inside)]
    changed = [name for name in matrices if not torch.allclose(ours[name], mean[name], atol=1e-4)]
    if statistics == "source":
        assert changed == matrices
    elif "resnet" in network:  # a block's first convolution sees the same merged features for every expert
        assert 0 < len(changed) < len(matrices)
    else:  # each expert's own norm comes first
        assert changed == matrices
    rest = [e.name for e in pool.layout.parameters if e.name.startswith(inside) and e.name not in matrices]
    for name in rest:
        torch.testing.assert_close(ours[name], mean[name])


@pytest.mark.parametrize(
    "factory",
    [
        HandWritten,
        lambda: timm.create_model("convnext_atto", num_classes=5),
        lambda: torchvision.models.squeezenet1_1(),
    ],
    ids=["hand_written", "convnext", "squeezenet"],
)
def test_regmean_pp_refuses_other_networks_and_says_why(factory: Callable) -> None:
    module = factory()
    with pytest.raises(ms.MergestreamError, match=r"block by block.*ViTs and ResNets.*regmean"):
        find_blocks(module)


class Odd(nn.Module):
    """Blocks whose names are known, but which do not run one after the other."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.fc = nn.Linear(12, len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        x = images.mean(dim=(2, 3)).repeat(1, 4)
        if self.order == "parallel":
            return self.fc(sum(torch.tanh(block(x)) for block in self.blocks))
        chain = [2, 1, 0] if self.order == "reversed" else [0, 1, 2, 1] if self.order == "repeated" else [0, 1, 2]
        for block in chain:
            x = torch.tanh(self.blocks[block](x))
        return self.fc(x)


@pytest.mark.parametrize("order", ["parallel", "reversed", "repeated", "chain"])
def test_regmean_pp_refuses_blocks_that_are_no_chain(order: str) -> None:
    experts = make_experts(lambda: Odd(order))
    pool = ms.ExpertPool.from_modules(experts, classes=CLASSES, preprocessing=PREPROCESSING)
    method = ms.create_method("regmean_pp", pool, statistics="target")
    if order == "chain":
        assert torch.isfinite(method(make_images(3))).all()
        return
    with pytest.raises(ms.MergestreamError, match="block by block"):
        method(make_images(3))
    with pytest.raises(ms.MergestreamError, match="block by block"):
        ms.measure_statistics(pool, IMAGES, ["gram_pp"])


def test_regmean_says_which_layers_it_solves() -> None:
    pool, _, _ = build("torchvision_vit")
    pool = ms.measure_statistics(pool, IMAGES, ["gram"])
    method = ms.create_method("regmean", pool)
    solved = method.layers(method.state)
    assert "encoder.layers.encoder_layer_0.self_attention.in_proj_weight" in solved
    assert "conv_proj.weight" in solved
    method = ms.create_method("regmean", pool, convolutions=False)
    assert "conv_proj.weight" not in method.layers(method.state)
    assert not any(name.endswith("bias") for name in solved)


def test_autocast_does_not_hide_the_layers() -> None:
    """It multiplies by copies of the weights; unnoticed, RegMean would become the mean."""
    pool, _, _ = build("timm_vit")
    plain = ms.measure_statistics(pool, IMAGES, ["gram"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ms.measure_statistics(pool, IMAGES, ["gram"])
    assert cast.statistics[0].fingerprint("gram") == plain.statistics[0].fingerprint("gram")


def test_regmean_pp_statistics_belong_to_one_pool_and_one_choice_of_options() -> None:
    pool, _, _ = build("timm_vit")
    shipped = ms.measure_statistics(pool, IMAGES, ["gram_pp"])
    ms.create_method("regmean_pp", shipped)
    for other, options in ((shipped, {"ridge": 0.1}), (shipped.without("lyon"), {})):
        with pytest.raises(ms.MergestreamError, match="needs statistics"):
            ms.create_method("regmean_pp", other, **options)
    with pytest.raises(ms.MergestreamError, match="every expert's site; those of turin"):
        ms.measure_statistics(pool, {name: IMAGES[name] for name in ("lyon", "brest")}, ["gram_pp"])


MEMORY = """
import ctypes, sys, torch
from torch import nn
import mergestream as ms
torch.set_num_threads(1)
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(192, 60_000), nn.Linear(60_000, 4)
    def forward(self, x):
        return self.fc(torch.tanh(self.body(x.flatten(1))))
start = Wide()
state = start.state_dict()
pool = ms.ExpertPool.from_state_dicts({f"expert{k}": state for k in range(int(sys.argv[1]))}, start, base=state)
assert pool.base is not None
method = ms.create_method("adamerging", pool, granularity=sys.argv[2])
torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # its first use imports modules, which would count as memory
ctypes.CDLL("libc.so.6").malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
method.step(torch.randn(2, 3, 8, 8))
print((status("VmHWM") - before) / pool.bank[0].nbytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("granularity", ["task", "layer"])
def test_adamerging_needs_no_more_memory_for_more_experts(granularity: str) -> None:
    """In models beyond bank and base: merged weights, one gradient, one tensor's difference. K graphs would be 2K."""

    def peak(experts: int) -> float:
        command = [sys.executable, "-c", MEMORY, str(experts), granularity]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    few, many = peak(2), peak(8)
    assert few < 4.5
    assert many < few + 0.5
