"""Small pools that all suites share. Networks have random weights: the algebra does not care."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import timm
import torch
from torch import Tensor, nn

import mergestream as ms
from graphs import RECORDED, Late, rerun
from mergestream.methods import base
from mergestream.methods.capture import Recorder
from mergestream.pool.statistics.measurement import KINDS

# Two workers share two cores: more threads than cores make OpenMP's barriers spin against each other.
torch.set_num_threads(1)
# New examples at every run of a developer, the same ones in CI: what lands must not depend on luck.
for profile, examples in (("quick", 20), ("thorough", 300)):
    hypothesis.settings.register_profile(profile, deadline=None, max_examples=examples, derandomize="CI" in os.environ)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

CLASSES = ("round", "spiculated", "ring", "divided", "other")
NAMES = ("lyon", "brest", "turin")


class HandWritten(nn.Module):
    """A user's own network: an integer buffer, tied layers and BatchNorm, none of a known library."""

    def __init__(self, classes: int = len(CLASSES)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Linear(8, 8)
        self.mix_again = self.mix
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("cache", torch.arange(4.0), persistent=False)
        self.fc = nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.stem(images))).mean(dim=(2, 3)) * self.scale
        return self.fc(torch.tanh(self.mix_again(torch.tanh(self.mix(features)))))


def micro_vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=len(CLASSES)
    )


def micro_resnet() -> nn.Module:
    return timm.create_model(
        "resnet18", layers=(1, 1, 1, 1), channels=(8, 12, 16, 24), zero_init_last=False, num_classes=len(CLASSES)
    )


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "vit": micro_vit,
    "resnet": micro_resnet,
    "hand_written": HandWritten,
}


def make_experts(
    factory: Callable[[], nn.Module], names: tuple[str, ...] = NAMES, seed: int = 0, head_noise: float = 1.0
) -> dict[str, nn.Module]:
    """Experts that share a start and differ clearly, heads most of all; BatchNorm statistics differ too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        start = factory().state_dict()
        experts = {}
        for number, name in enumerate(names):
            module = factory()
            module.load_state_dict(start)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
                for key, buffer in module.named_buffers():
                    if "running_var" in key:
                        buffer.add_(torch.rand_like(buffer))
                    elif "running_mean" in key:
                        buffer.add_(0.3 * torch.randn_like(buffer))
                    elif "num_batches" in key:
                        buffer.add_(number + 1)
                for key, parameter in module.named_parameters():
                    if key.startswith(("head.", "fc.", "classifier.", "heads.")):
                        parameter.add_(head_noise * (number + 1) * torch.randn_like(parameter))
            experts[name] = module.eval()
    return experts


PREPROCESSING = ms.Preprocessing(size=(16, 16))


def make_base(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The start that `make_experts` gives its experts at this seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return factory().eval()


def make_pool(
    kind: str, names: tuple[str, ...] = NAMES, seed: int = 0, base: bool = False, statistics: bool = False
) -> ms.ExpertPool:
    factory = FACTORIES[kind]
    pool = ms.ExpertPool.from_modules(
        make_experts(factory, names, seed),
        classes=CLASSES,
        preprocessing=PREPROCESSING if kind != "vit" else None,
        base=make_base(factory, seed) if base else None,
    )
    return with_statistics(pool) if statistics else pool


def with_statistics(pool: ms.ExpertPool) -> ms.ExpertPool:
    """Every kind of statistics the pool's network allows, each expert's on images of its own."""
    images = {name: make_images(10, seed=100 + sum(map(ord, name))) for name in pool.names}
    kinds = [kind for kind in KINDS if kind != "gram_pp" or has_blocks(pool)]
    return ms.measure_statistics(pool, images, kinds, batch_size=4)


def has_blocks(pool: ms.ExpertPool) -> bool:
    return not isinstance(pool.template.module, HandWritten)


def make_images(count: int = 6, size: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="session", params=list(FACTORIES))
def pool(request: pytest.FixtureRequest) -> ms.ExpertPool:
    return make_pool(request.param, base=True, statistics=True)


@pytest.fixture(scope="session")
def vit_pool() -> ms.ExpertPool:
    return make_pool("vit", base=True, statistics=True)


@pytest.fixture
def images() -> Tensor:
    return make_images()


@pytest.fixture
def graphs_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Methods step as on a GPU, by graphs that are the recorded functions; nothing is left of them afterwards."""
    monkeypatch.setattr(base, "recorder_for", lambda _: Recorder(rerun, Late))
    RECORDED.clear()
    yield
    RECORDED.clear()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium, for tests that look at a page."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium here: scripts/install_browser.sh installs Debian's")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is in the dev extra")
    with playwright.sync_playwright() as driver:
        # Containers often run as root, where chromium's own sandbox does not start.
        running = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and pool of a tiny consortium; tests that change them copy them first."""
    from benching import write_consortium

    folder = tmp_path_factory.mktemp("consortium")
    write_consortium(folder)
    return folder


@pytest.fixture(scope="session")
def benched(consortium: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The one benchmark of a test run: all methods on two streams, and what the command printed."""
    from benching import bench_arguments, command

    out = tmp_path_factory.mktemp("bench") / "out"
    done = command(*bench_arguments(consortium, out))
    assert done.returncode == 0, done.stderr
    return out, done.stdout
