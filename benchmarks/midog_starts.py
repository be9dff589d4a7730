"""Where heads start and which loss trains them: MIDOG 2025, four starts x two losses x seeds, through train and bench.

    python3 benchmarks/midog_starts.py --root midog25-64.zip --init vit.safetensors --out work --json midog_starts.json

Row after row: its pools are trained, then benched, then the row is added to the file; rows that are in it already are
not done again, so it may be killed and called again, also on another machine. Nothing is chosen on a target's labels.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from mergestream.bench.engine.benchmark import run_bench
from mergestream.bench.engine.request import plan_from as bench_plan
from mergestream.pool.expert_card import BASE, library_versions, read_card
from mergestream.runtime.option_text import parse_value
from mergestream.runtime.parallel import quiet, run_jobs
from mergestream.training import Recipe
from mergestream.training.head_start import HEAD_INITS
from mergestream.training.training_plan import plan_from as train_plan
from mergestream.training.training_run import run_training

METHODS = "ensemble, mean, entropy_adaptive(head=shared), entropy_adaptive"
RECIPE = "steps=300, batch_size=64, optimiser=adamw, schedule=cosine, augmentation=0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print the table of what the file holds")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--init", default="random")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--network", default="vit_small_patch14_dinov2")
    parser.add_argument("--arg", action="append", default=[])
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--settings", default="learning_rate=3e-5")
    parser.add_argument("--starts", default=",".join(HEAD_INITS))
    parser.add_argument("--losses", default="plain,weighted")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--device", default="cuda")
    # Processes take turns on one GPU unless its multi-process service runs: two hide each other's Python, no more.
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.json.read_text())["rows"]))
        return
    if given.root is None or given.out is None:
        parser.error("--root and --out say where the data are and where pools go")
    rows = json.loads(given.json.read_text())["rows"] if given.json.exists() else []
    done = [(row["head_init"], row["loss"]) for row in rows]
    seeds = [int(seed) for seed in given.seeds.split(",")]
    for start, loss in product(given.starts.split(","), given.losses.split(",")):
        if (start, loss) in done:
            continue
        began = time.perf_counter()
        wanted = [(given, start, loss, seed) for seed in seeds]
        run_jobs(train, wanted, workers=given.jobs, on_done=lambda: None, device=given.device)
        trained = time.perf_counter()
        row = bench(given, start, loss)
        row["seconds"] = {"train": trained - began, "bench": time.perf_counter() - trained}
        print(start, loss, {key: round(value) for key, value in row["seconds"].items()}, flush=True)
        rows.append(row)
        given.json.write_text(json.dumps({**about(given), "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: accuracy / balanced accuracy / AUROC in %, and the interval of the balanced accuracy."""
    labels = METHODS.split(", ")
    lines = ["| head start | loss | " + " | ".join(labels) + " |", "|---|---|" + "---|" * len(labels)]
    for row in rows:
        of = {method["label"]: method for method in row["methods"]}
        lines.append(
            f"| {row['head_init']} | {row['loss']} | " + " | ".join(_cell(of[label]) for label in labels) + " |"
        )
    return "\n".join(lines)


def _cell(method: dict[str, Any]) -> str:
    balanced = method["balanced_accuracy"]
    scores = [method["accuracy"]["mean"], balanced["mean"], method["auroc"]]
    return (
        " / ".join(f"{100 * score:.1f}" for score in scores)
        + f" [{100 * balanced['low']:.1f}, {100 * balanced['high']:.1f}]"
    )


def about(given: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "versions": library_versions(),
        "command": " ".join(["python3", *(Path(word).name if word.startswith("/") else word for word in sys.argv)]),
        "recipe": given.recipe,
        "settings": given.settings,
    }


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
    findings = run_bench(plan, given.out / "runs" / f"{start}-{loss.replace('/', '-')}", quiet, jobs=given.jobs)
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


if __name__ == "__main__":
    main()
