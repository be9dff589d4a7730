"""Where heads start and which loss trains them: MIDOG 2025, four starts x two losses x seeds, through train and bench.

    PYTHONPATH=src python3 benchmarks/midog_starts.py train --root midog25-64.zip --init vit.safetensors --out work
    PYTHONPATH=src python3 benchmarks/midog_starts.py bench --root midog25-64.zip --out work --json midog_starts.json

What is done is not done again, so both may be killed and called again. Nothing is chosen on a target's labels.
"""

import argparse
import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from mergestream.bench import run_bench
from mergestream.benchmarking.request import plan_from as bench_plan
from mergestream.checkpoints import BASE, library_versions, read_card
from mergestream.parallel import quiet, run_jobs
from mergestream.spelling import parse_value
from mergestream.train import run_training
from mergestream.training import HEAD_INITS, Recipe
from mergestream.training.plan import plan_from as train_plan

METHODS = "ensemble, mean, entropy_adaptive(head=shared), entropy_adaptive"
RECIPE = "steps=300, batch_size=64, optimiser=adamw, schedule=cosine, augmentation=0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("train", "bench"))
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--init", default="random")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--network", default="vit_small_patch14_dinov2")
    parser.add_argument("--arg", action="append", default=[])
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--settings", default="learning_rate=1e-5|3e-5")
    parser.add_argument("--starts", default=",".join(HEAD_INITS))
    parser.add_argument("--losses", default="plain,weighted,weighted/balanced")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=8)
    given = parser.parse_args()
    cases = list(product(given.starts.split(","), given.losses.split(","), map(int, given.seeds.split(","))))
    if given.stage == "train":
        run_jobs(train, [(given, *case) for case in cases], workers=given.jobs, on_done=tick, device=given.device)
        return
    rows = list(dict.fromkeys((start, loss) for start, loss, _ in cases))
    found = run_jobs(bench, [(given, *row) for row in rows], workers=given.jobs, on_done=tick, device=given.device)
    told = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "versions": library_versions(),
        "command": " ".join(["python3", *(Path(word).name if word.startswith("/") else word for word in sys.argv)]),
        "rows": found,
    }
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")


def train(given: argparse.Namespace, start: str, loss: str, seed: int) -> None:
    """One pool. 'weighted/balanced' is a weighted loss whose steps are chosen by the balanced criterion too."""
    kind, _, criterion = loss.partition("/")
    options: dict[str, Any] = dict(_option(item) for item in given.recipe.split(","))
    recipe = Recipe(
        loss=kind, criterion=criterion or "plain", seed=seed, validate_every=50, accelerator=given.device,
        precision="bf16-mixed" if given.device == "cuda" else "32-true", **options,
    )  # fmt: skip
    plan = train_plan(
        dataset="midog", root=given.root, data_options=[], skip_bad=0, allow_missing_classes=False,
        network=given.network, arguments=given.arg or ["img_size=84"], init=given.init, settings=given.settings,
        start=recipe, head_init=start, keep_every=60.0,
    )  # fmt: skip
    run_training(plan, pool_of(given, start, loss, seed), quiet)


def bench(given: argparse.Namespace, start: str, loss: str) -> dict[str, Any]:
    """The pools of all seeds on i.i.d. streams: one row of the table."""
    pools = [pool_of(given, start, loss, int(seed)) for seed in given.seeds.split(",")]
    plan = bench_plan(
        dataset="midog", root=given.root, pools=[str(pool) for pool in pools], methods=METHODS, streams="iid",
        seeds="0", device=given.device,
    )  # fmt: skip
    findings = run_bench(plan, given.out / "runs" / f"{start}-{loss.replace('/', '-')}", quiet)
    cards = [
        read_card(folder)
        for pool in pools
        for folder in sorted(pool.iterdir())
        if folder.is_dir() and folder.name != BASE
    ]
    return {
        "head_init": start,
        "loss": loss,
        "experts_at_home": {
            score: sum(card.metrics["validation"][score] for card in cards) / len(cards)
            for score in ("accuracy", "balanced_accuracy")
        },
        "best_steps": [card.metrics["best_step"] for card in cards],
        "learning_rates": [card.recipe["learning_rate"] for card in cards],
        "methods": [row.to_json() for row in findings.rows],
        "duels": [asdict(duel) for duel in findings.duels],
        "collapses": [asdict(each) for each in findings.collapses],
    }


def pool_of(given: argparse.Namespace, start: str, loss: str, seed: int) -> Path:
    return given.out / "pools" / f"{start}-{loss.replace('/', '-')}-{seed}"


def _option(item: str) -> tuple[str, Any]:
    name, _, value = item.strip().partition("=")
    return name, parse_value(value)


def tick() -> None:
    print(".", end="", flush=True)


if __name__ == "__main__":
    main()
