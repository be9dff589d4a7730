"""Properties of pools: real ones of PACS and MIDOG beside the demo's phantoms, which are calibrated to them.

A property describes the experts and their plain average; no adaptive method is run.

    python3 benchmarks/pool_properties.py real --root pacs=pacs.zip midog=m.zip --pool pacs=W/pacs-shared-0
    python3 benchmarks/pool_properties.py phantom demo
    python3 benchmarks/pool_properties.py table      # from the record

Real pools are those of `mergestream train`, as `real_pools.py` makes them. Accuracies are balanced over classes.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from provenance import provenance
from torch import Tensor

import mergestream as ms
from mergestream.bench.demo import FULL
from mergestream.bench.drift.pool_drift import Drift, analyse_drift
from mergestream.functional.metrics import summarise
from mergestream.training.training_loop import split_of

RECORD = Path(__file__).parent / "results" / "pool_properties.json"
IMAGES = 700  # per target, at most; real networks are slow
# Heading, field of a pool's properties, and the factor for printing.
COLUMNS = (
    ("heads apart °", "head_angle", 1),
    ("blocks apart °", "block_angle", 1),
    ("blocks' moves apart °", "move_angle", 1),
    ("at home %", "home", 100),
    ("falls abroad by", "drop", 100),
    ("mean %", "mean", 100),
    ("mean less ensemble", "mean_less_ensemble", 100),
    ("confidence at home %", "confidence_home", 100),
    ("confidence abroad %", "confidence_abroad", 100),
    ("overconfidence abroad", "overconfidence", 100),
    ("temperature", "temperature", 1),
)


@dataclass(frozen=True)
class Site:
    """A domain's images as the networks take them, its labels, and where its expert's validation images are."""

    images: Tensor
    labels: Tensor
    validation: Tensor

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        chosen = np.sort(np.random.RandomState(0).permutation(len(self.labels))[:count])
        return self.images[chosen], self.labels[chosen]


@torch.no_grad()
def expert_answers(pool: ms.ExpertPool, images: Tensor) -> Tensor:
    """Probabilities [K,B,C] of every expert."""
    return torch.cat([pool.logits(part) for part in images.split(256)], dim=1).float().softmax(-1)


def score(answers: Tensor, labels: Tensor, pool: ms.ExpertPool) -> tuple[float, float, float]:
    """Balanced accuracy, mean confidence, and accuracy of probabilities [B,C]."""
    report = summarise(answers, labels, pool.classes)
    return report["balanced_accuracy"], float(answers.amax(-1).mean()), report["accuracy"]


def angles(drift: Drift) -> dict[str, float]:
    """Mean angles between experts, and between their moves from the start, in degrees; blocks that moved only."""
    blocks = [layer.whole for layer in drift.of_kind("block") if layer.whole.mean_angle]
    moves = [block.from_base.mean_angle for block in blocks if block.from_base]
    return {
        "head_angle": mean(drift.values("head", "mean_angle")),
        "block_angle": mean(block.mean_angle for block in blocks),
        "move_angle": mean(moves),
    }


def properties(pool: ms.ExpertPool, sites: dict[str, Site], drift: Drift, count: int = IMAGES) -> dict[str, float]:
    """Means over experts, over pairs, and over targets that are each left out of the average."""
    home, abroad, averages, ensembles = [], [], [], []
    for target, site in sites.items():
        others, (images, labels) = pool.without(target), site.sample(count)
        answers = expert_answers(pool.without(*others.names), site.images[site.validation])[0]
        home.append(score(answers, site.labels[site.validation], pool))
        abroad += [score(each, labels, pool) for each in expert_answers(others, images)]
        for name, scores in (("mean", averages), ("ensemble", ensembles)):
            method = ms.create_method(name, others)
            answers = torch.cat([method(part).float().softmax(-1) for part in images.split(256)])
            scores.append(score(answers, labels, pool)[0])
    return {
        **angles(drift),
        "home": mean(each[0] for each in home),
        "drop": mean(each[0] for each in home) - mean(each[0] for each in abroad),
        "mean": mean(averages),
        "mean_less_ensemble": mean(averages) - mean(ensembles),
        "confidence_home": mean(each[1] for each in home),
        "confidence_abroad": mean(each[1] for each in abroad),
        "overconfidence": mean(each[1] - each[2] for each in abroad),
        "temperature": mean(float(value) for value in pool.temperatures),
    }


def real_pools(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    roots = dict(text.split("=", 1) for text in arguments.root)
    for name, folder in (text.split("=", 1) for text in arguments.pool):
        pool, sites = ms.ExpertPool.load(folder), {}
        size, start = pool.template.require_preprocessing().size[0], pool.cards[0].recipe["head_init"]
        dataset = ms.load_dataset(name, root=roots[name], size=size)
        for card in pool.cards:
            data = dataset[card.domain or card.name]
            sites[card.name] = Site(data.batch(torch.arange(len(data))), data.labels, split_of(data, card.recipe)[1])
        network = str(pool.template.architecture).split(":")[-1]
        narrow = pool.to("cpu", dtype=torch.bfloat16)
        yield f"{name}, {start} heads, {network}", properties(narrow, sites, analyse_drift(folder), arguments.images)


def phantom_pools(folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
    dataset = ms.load_dataset("phantom", images=FULL.images)
    for seed in FULL.seeds:
        path = folder / ("pool" if seed == 0 else f"pool-seed{seed}")
        pool, sites = ms.ExpertPool.load(path), {}
        for name, recipe in ((card.name, card.recipe) for card in pool.cards):
            sites[name] = Site(dataset[name].images, dataset[name].labels, split_of(dataset[name], recipe)[1])
        yield f"phantoms, seed {seed}", properties(pool, sites, analyse_drift(path))


def table(record: dict[str, Any]) -> str:
    """Real pools and the phantoms; a phantom's value outside the range of several real pools is bold."""
    real, phantom = record["real"]["pools"], record["phantom"]["pools"]
    lines = ["| pool | " + " | ".join(heading for heading, _, _ in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, own in {**real, **phantom}.items():
        cells = []
        for _, field, factor in COLUMNS:
            values = [each[field] for each in real.values() if field in each]
            cell = f"{factor * own[field]:.1f}" if field in own else "–"
            outside = field in own and len(values) > 1 and not min(values) <= own[field] <= max(values)
            cells.append(f"**{cell}**" if outside else cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    real, phantom = commands.add_parser("real"), commands.add_parser("phantom")
    real.add_argument("--pool", nargs="+", required=True, help="as in pacs=FOLDER")
    real.add_argument("--images", type=int, default=256, help="per target, at most")
    real.add_argument("--root", nargs="+", required=True, help="as in pacs=pacs.zip")
    phantom.add_argument("folder", type=Path)
    commands.add_parser("table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    if arguments.command != "table":
        pools = real_pools(arguments) if arguments.command == "real" else phantom_pools(arguments.folder)
        record[arguments.command] = {"about": provenance(), "pools": dict(pools)}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if "phantom" in record and "real" in record:
        print(table(record))


if __name__ == "__main__":
    main()
