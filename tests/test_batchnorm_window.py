"""BatchNorm statistics from a window of the stream with sums of its own for every class."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mergestream as ms
from conftest import make_images, make_pool
from mergestream.methods.batchnorm_window import BatchNormWindow
from mergestream.networks.layers import batchnorm_layers
from mergestream.pool.runner import Batch

SETTINGS = {"class_images": 3.0, "start_classes": 1.5, "home_batches": 2.0, "memory": 10.0, "mix_memory": 40.0}


class TwoNorms(nn.Module):
    """Convolution, BatchNorm, convolution, BatchNorm, mean over pixels, linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm_one = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.two, self.norm_two = nn.Conv2d(4, 5, 3, bias=False), nn.BatchNorm2d(5)
        self.fc = nn.Linear(5, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm_one(self.one(images)))
        return self.fc(torch.relu(self.norm_two(self.two(hidden))).mean(dim=(2, 3)))


def two_norms_pool() -> ms.ExpertPool:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        experts = {name: TwoNorms().eval() for name in ("a", "b")}
        for module in experts.values():
            for norm in (module.norm_one, module.norm_two):
                norm.running_mean.uniform_(-0.2, 0.2)
                norm.running_var.uniform_(0.05, 0.5)
    pool = ms.ExpertPool.from_modules(experts, classes=("x", "y", "z"))
    for name, counts in (("a", {"x": 6, "y": 2, "z": 2}), ("b", {"x": 2, "y": 4, "z": 4})):
        pool = pool.annotate(name, class_counts=counts)
    return pool


class Reference:
    """The equations of docs/methods.md in numpy, one image, class and channel at a time."""

    def __init__(self, module: TwoNorms, home: list[float]) -> None:
        self.module, self.home, classes = module, np.array(home), len(home)
        self.norms = [module.norm_one, module.norm_two]
        self.merged = [(n.running_mean.double().numpy(), n.running_var.double().numpy()) for n in self.norms]
        self.images, self.mix = np.zeros(classes), np.zeros(classes)
        self.sums = [np.zeros((2, classes, len(mean))) for mean, _ in self.merged]

    def statistics(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        mix = self.mix + SETTINGS["home_batches"] * self.home
        mix, moments = mix / mix.sum(), []
        for sums, start in zip(self.sums[layer], (0.0, 1.0), strict=True):
            certain = self.images / (self.images + SETTINGS["class_images"])
            own = np.array([s / n if n > 0 else s * 0 for s, n in zip(sums, self.images, strict=True)])
            common = sum(c * o for c, o in zip(certain, own, strict=True)) + SETTINGS["start_classes"] * start
            common = common / (certain.sum() + SETTINGS["start_classes"])
            of_class = [c * o + (1 - c) * common for c, o in zip(certain, own, strict=True)]
            moments.append(sum(share * mean for share, mean in zip(mix, of_class, strict=True)))
        mean, variance = self.merged[layer]
        return mean + np.sqrt(variance) * moments[0], variance * (moments[1] - moments[0] ** 2)

    def normalised(self, layer: int, inputs: np.ndarray) -> Tensor:
        mean, variance = (values[None, :, None, None] for values in self.statistics(layer))
        norm = self.norms[layer]
        scaled = (inputs - mean) / np.sqrt(variance + norm.eps)
        weight, bias = (v.detach().double().numpy()[None, :, None, None] for v in (norm.weight, norm.bias))
        return torch.relu(torch.from_numpy(scaled * weight + bias))

    def forward(self, images: Tensor, answers: np.ndarray | None = None) -> Tensor:
        """Logits; with answers [B,C] the layers' sums take the batch in on the way."""
        hidden, module = images.double(), self.module
        if answers is not None:
            new = answers.sum(axis=0)
            faded = np.exp(-new / SETTINGS["memory"])
            self.images = faded * self.images + new
            self.mix = np.exp(-len(images) / SETTINGS["mix_memory"]) * self.mix + answers.mean(axis=0)
        for layer, convolution in enumerate((module.one, module.two)):
            inputs = torch.conv2d(hidden, convolution.weight.detach().double()).numpy()
            if answers is not None:
                self.sums[layer] *= faded[None, :, None]
                mean, variance = self.merged[layer]
                for image, answer in zip(inputs, answers, strict=True):
                    for channel, pixels in enumerate(image):
                        units = (pixels - mean[channel]) / np.sqrt(variance[channel])
                        for label, share in enumerate(answer):
                            self.sums[layer][0, label, channel] += share * units.mean()
                            self.sums[layer][1, label, channel] += share * (units**2).mean()
            hidden = self.normalised(layer, inputs)
        weight, bias = module.fc.weight.detach().double(), module.fc.bias.detach().double()
        return hidden.mean(dim=(2, 3)) @ weight.T + bias


@pytest.mark.parametrize("with_experts", [False, True])
def test_the_window_is_that_of_the_equations(with_experts: bool) -> None:
    pool = two_norms_pool()
    module = pool.network([0.5, 0.5])
    window = replace(BatchNormWindow.of(pool, "window"), **SETTINGS)
    reference, state = Reference(module, [0.4, 0.3, 0.3]), window.start()
    torch.testing.assert_close(window.home, torch.tensor([0.4, 0.3, 0.3]))
    for seed, size in enumerate((4, 1, 6, 3)):
        images = 0.5 + torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        batch = Batch(pool.prepare(images))
        experts = pool.logits_of_views(batch)["original"] if with_experts else None
        logits, state = window.answer(batch, state, pool.merge([0.5, 0.5]), experts)
        if experts is None:
            answers = torch.softmax(reference.forward(images), dim=-1)
        else:
            answers = torch.softmax(experts.double(), dim=-1).mean(dim=0)
        expected = reference.forward(images, answers.numpy())
        torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
    assert float((state.images - torch.from_numpy(reference.images)).abs().max()) < 1e-4


@pytest.mark.parametrize("logits", [[9.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 2.0, -1.0]])
def test_without_a_start_the_first_batch_alone_decides(logits: list[float]) -> None:
    """As recalibrate_bn=True, whose variances divide by one value less."""
    pool = two_norms_pool()
    batch = Batch(pool.prepare(torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))))
    window = BatchNormWindow(pool, torch.ones(3) / 3, class_images=0, start_classes=0, home_batches=0)
    ours, theirs = pool.merge([0.5, 0.5]), pool.merge([0.5, 0.5])
    answers, _ = window.answer(batch, window.start(), ours, torch.tensor(logits).expand(2, 6, 3))
    expected = pool.forward(theirs, batch.images, recalibrate_bn=True)
    torch.testing.assert_close(answers, expected, rtol=0.02, atol=0.02)
    values = {"norm_one": 6 * 6 * 6, "norm_two": 6 * 4 * 4}
    for name, count in values.items():
        (mine, other) = (pool.layout.views(w)[f"{name}.running_mean"] for w in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=0.02, atol=5e-3)
        (mine, other) = (pool.layout.views(w)[f"{name}.running_var"] for w in (ours, theirs))
        torch.testing.assert_close(mine, other * (count - 1) / count, rtol=0.02, atol=1e-3)
    first = pool.layout.views(ours)["norm_one.running_mean"]
    torch.testing.assert_close(first, pool.layout.views(theirs)["norm_one.running_mean"], rtol=1e-4, atol=1e-5)


def test_padding_counts_nothing() -> None:
    pool = make_pool("resnet")
    window, images = BatchNormWindow.of(pool, "window"), pool.prepare(make_images(6, size=32))
    small, weights = Batch(images[:4]), [1 / 3] * 3
    padded = Batch(images, shares=torch.tensor([0.25] * 4 + [0.0] * 2))
    alone, after = window.answer(small, window.start(), pool.merge(weights), None)
    filled, after_filled = window.answer(padded, window.start(), pool.merge(weights), None)
    torch.testing.assert_close(filled[:4], alone, rtol=1e-4, atol=1e-4)
    for mine, other in zip(vars(after).values(), vars(after_filled).values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_before_a_stream_the_statistics_are_the_merged_ones() -> None:
    pool = make_pool("resnet")
    plain, window = (ms.create_method("mean", pool, recalibrate_bn=choice) for choice in (False, "window"))
    torch.testing.assert_close(window.merged_weights(), plain.merged_weights(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mean", "entropy_adaptive"])
def test_merged_weights_are_those_that_answered(name: str) -> None:
    pool = make_pool("resnet")
    method = ms.create_method(name, pool, recalibrate_bn="window")
    for seed in range(3):
        images = make_images(4, size=32, seed=seed)
        step = method.step(images)
        torch.testing.assert_close(pool.forward(method.merged_weights(), images), step.logits, rtol=1e-3, atol=1e-3)
    again = ms.create_method(name, pool, recalibrate_bn="window")
    again.load_state_dict(method.state_dict())
    torch.testing.assert_close(again.merged_weights(), method.merged_weights())


@pytest.mark.parametrize(("name", "forwards"), [("mean", 2), ("entropy_adaptive", 1)])
def test_experts_that_were_asked_save_the_extra_forward(name: str, forwards: int) -> None:
    method = ms.create_method(name, make_pool("resnet"), recalibrate_bn="window")
    assert method.step(make_images(3)).merged_forwards == forwards


def test_a_network_without_batchnorm_is_answered_as_without_the_window(vit_pool: ms.ExpertPool) -> None:
    plain, window = (ms.create_method("mean", vit_pool, recalibrate_bn=choice) for choice in (False, "window"))
    for seed in range(2):
        assert torch.equal(plain(make_images(seed=seed)), window(make_images(seed=seed)))


@pytest.mark.parametrize("name", ["mean", "ties", "entropy_adaptive"])
@pytest.mark.parametrize("choice", ["Window", "batch", 1, None])
def test_other_values_are_refused(name: str, choice: object) -> None:
    with pytest.raises(ms.MergestreamError, match="true, false or 'window'"):
        ms.create_method(name, make_pool("resnet", base=True), recalibrate_bn=choice)


def test_the_mix_before_a_stream_is_in_the_provenance() -> None:
    pool = two_norms_pool()
    method = ms.create_method("mean", pool, recalibrate_bn="window")
    assert method.provenance["cards"]["batchnorm_mix"] == pytest.approx([0.4, 0.3, 0.3])
    assert "cards" not in ms.create_method("mean", pool, recalibrate_bn=True).provenance


class Brightness(nn.Module):
    """Three classes by the brightest channel, relative to what BatchNorm thinks is usual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm2d(3, affine=False), nn.Linear(3, 3)
        with torch.no_grad():
            self.fc.weight.copy_(4 * torch.eye(3))
            self.fc.bias.zero_()

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.norm(images).mean(dim=(2, 3)))


def shifted_stream(per_batch: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of 12 with `per_batch` classes, from a site whose channels are brighter by 2, 0 and -1."""
    random = torch.Generator().manual_seed(seed)
    batches = []
    for number in range(24):
        classes = torch.arange(number, number + per_batch) % 3
        labels = classes[torch.randint(per_batch, (12,), generator=random)]
        signal = 1.5 * nn.functional.one_hot(labels, 3) - 0.5 + torch.tensor([2.0, 0.0, -1.0])
        pixels = signal[:, :, None, None] + 0.5 * torch.randn(12, 3, 4, 4, generator=random)
        batches.append((pixels, labels))
    return batches


@pytest.mark.parametrize("name", ["mean", "entropy_adaptive"])
def test_a_window_survives_batches_of_one_class(name: str) -> None:
    """On a shifted site one batch's statistics fail where it holds one class, the merged ones always."""
    pool = ms.ExpertPool.from_modules({"a": Brightness().eval(), "b": Brightness().eval()}, classes=("r", "g", "b"))
    accuracy: dict[tuple[object, int], float] = {}
    for choice in (False, True, "window"):
        for per_batch in (1, 3):
            method = ms.create_method(name, pool, recalibrate_bn=choice)
            right = [(method(images).argmax(dim=-1) == labels) for images, labels in shifted_stream(per_batch, 0)]
            accuracy[choice, per_batch] = float(torch.cat(right).float().mean())
    assert accuracy[False, 3] < 0.8 > accuracy[False, 1]
    assert accuracy[True, 3] > 0.95
    assert accuracy[True, 1] < 0.6
    assert accuracy["window", 3] > 0.95
    assert accuracy["window", 1] > 0.85


def test_a_layer_that_sees_rows_instead_of_images_takes_their_mean() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.BatchNorm1d(3), nn.Linear(3, 2)

        def forward(self, images: Tensor) -> Tensor:
            rows = images.flatten(2).transpose(1, 2).reshape(-1, 3)
            return self.fc(self.norm(rows).view(len(images), -1, 3).mean(dim=1))

    pool = ms.ExpertPool.from_modules({"a": Rows().eval()}, classes=("x", "y"))
    window = BatchNormWindow(pool, torch.ones(2) / 2, class_images=0, start_classes=0, home_batches=0)
    weights, images = pool.merge([1.0]), 3 + torch.randn(2, 3, 4, 4)
    window.answer(Batch(pool.prepare(images)), window.start(), weights, None)
    (layer,) = batchnorm_layers(pool.module_with(weights))
    torch.testing.assert_close(layer.running_mean, images.mean(dim=(0, 2, 3)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.running_var, images.var(dim=(0, 2, 3), correction=0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["mean", "entropy_adaptive"])
def test_a_wrapper_carries_the_window_of_its_base(name: str) -> None:
    pool, base = make_pool("resnet"), f"{name}(recalibrate_bn=window)"
    alone = ms.create_method(name, pool, recalibrate_bn="window")
    first, second = (ms.create_method("corrected", pool, base=base) for _ in range(2))
    for method in (alone, first):
        method.step(make_images(4))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(make_images(3, seed=1)), second(make_images(3, seed=1)))
    alone.step(make_images(3, seed=1))
    assert torch.equal(second.state.base.window.means, alone.state.window.means)
