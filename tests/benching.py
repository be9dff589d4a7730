"""A tiny consortium for the benchmark's suites: three sites' experts and the stand-in of their own table of images."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import mergestream as ms
from conftest import make_base, make_experts
from mergestream.cli import app as cli
from mergestream.data.datasets.standins.drawing import CLASSES, SITES, write_table
from mergestream.networks.architecture import create_network
from mergestream.pool.checkpoint import write_expert, write_statistics
from mergestream.pool.expert_card import BASE, ExpertCard

NETWORK = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def network(classes: tuple[str, ...] = CLASSES) -> nn.Module:
    return create_network("vit_tiny_patch16_224", num_classes=len(classes), **NETWORK).module


def write_consortium(folder: Path) -> None:
    """folder/data: the table; folder/pool: an expert per site, base and statistics, trained by nobody."""
    write_table(folder / "data")
    write_pool(folder / "pool")


@pytest.fixture(scope="module")
def pool_on_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pool; `pool = pool_on_disk` makes it a suite's own fixture."""
    folder = tmp_path_factory.mktemp("pools") / "pool"
    write_pool(folder)
    return folder


def write_pool(
    folder: Path,
    sites: tuple[str, ...] = SITES,
    domains: dict[str, str] | None = None,
    recipes: dict[str, dict[str, str]] | None = None,
    seed: int = 0,
    classes: tuple[str, ...] = CLASSES,
) -> None:
    architecture = create_network("vit_tiny_patch16_224", num_classes=len(classes), **NETWORK)
    factory = partial(network, classes)
    base = write_expert(
        folder / BASE, make_base(factory, seed).state_dict(), ExpertCard.for_network(BASE, architecture, classes)
    )
    for site, expert in make_experts(factory, sites, seed).items():
        card = ExpertCard.for_network(
            site,
            architecture,
            classes,
            domain=(domains or {}).get(site, site),
            recipe=(recipes or {}).get(site, {}),
            base_sha256=base.weights_sha256,
        )
        write_expert(folder / site, expert.state_dict(), card)
    pool = ms.ExpertPool.load(folder)
    generator = torch.Generator().manual_seed(seed)
    images = {
        site: torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8, generator=generator) for site in pool.names
    }
    measured = ms.measure_statistics(pool, images, ("gram", "fisher_exact"))
    for card, statistics in zip(pool.cards, measured.statistics, strict=True):
        write_statistics(folder / card.name, statistics, card)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in this process: starting another one takes longer than most of the work."""
    shown, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["mergestream", *arguments]),
        mock.patch.dict(os.environ, {"COLUMNS": "120", **environment}),
        redirect_stdout(shown),
        redirect_stderr(errors),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, code, shown.getvalue(), errors.getvalue())


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    line = [sys.executable, "-m", "mergestream", *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **environment}
    return subprocess.run(line, capture_output=True, text=True, env=variables, check=False)


def bench_arguments(folder: Path, out: Path, *more: str) -> tuple[str, ...]:
    """A benchmark of the consortium on two streams and two seeds, in this process by default."""
    settled = {
        "--methods": "all",
        "--streams": "iid,dirichlet:0.05",
        "--seeds": "0,1",
        "--batch-size": "4",
        "--jobs": "1",
    }
    for name, value in zip(more[::2], more[1::2], strict=False):
        if name in settled:
            settled[name] = value
    rest = [m for i, m in enumerate(more) if m not in settled and (i == 0 or more[i - 1] not in settled)]
    fixed = ["--dataset", "table", "--root", str(folder / "data"), "--pool", str(folder / "pool"), "--out", str(out)]
    return ("bench", *fixed, *(word for pair in settled.items() for word in pair), *rest)


def contents(out: Path) -> dict[str, Any]:
    """Everything a benchmark wrote that is not a time: predictions bit for bit, steps, metrics."""
    runs: dict[str, Any] = {}
    for folder in sorted((out / "runs").glob("[!.]*")):  # a killed writer leaves crumbs that begin with a dot
        header = json.loads((folder / "run.json").read_text())
        steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        with np.load(folder / "predictions.npz") as stored:
            arrays = {key: stored[key].tobytes() for key in stored.files}
        for timed in (*steps, header):
            for key in ("seconds", "seconds_per_step", "environment"):
                timed.pop(key, None)
        runs[folder.name] = (header, steps, arrays)
    return runs
