"""What all suites share: small pools, and fixtures."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor

import mergestream as ms
from graphs import RECORDED, Late, rerun
from mergestream.methods import base
from mergestream.methods.capture import Recorder
from mergestream.testing.small_pools import (  # noqa: F401  other suites import them from here
    CLASSES,
    FACTORIES,
    NAMES,
    PREPROCESSING,
    HandWritten,
    has_blocks,
    make_base,
    make_experts,
    make_images,
    make_pool,
    micro_resnet,
    micro_vit,
    with_statistics,
)

# Two workers share two cores: more threads than cores make OpenMP's barriers spin against each other.
torch.set_num_threads(1)
# New examples at every run of a developer, the same ones in CI: what lands must not depend on luck.
for profile, examples in (("quick", 20), ("thorough", 300)):
    hypothesis.settings.register_profile(profile, deadline=None, max_examples=examples, derandomize="CI" in os.environ)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


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


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """No TF32 on a GPU. Put back by hand: `monkeypatch` would delete the setting, which is no plain attribute."""
    settings = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [each.allow_tf32 for each in settings]
    for each in settings:
        each.allow_tf32 = False
    yield
    for each, allowed in zip(settings, before, strict=True):
        each.allow_tf32 = allowed


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium, for tests that look at a page."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no chromium here: scripts/install_browser.sh installs Debian's")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is in the dev extra")
    with playwright.sync_playwright() as driver:
        # Containers often run as root, where chromium's own sandbox does not start.
        running = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
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
