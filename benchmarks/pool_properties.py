"""Properties of pools: real ones of PACS and MIDOG beside the demo's phantoms, which are calibrated to them.

A property describes the experts and their plain average; no adaptive method is run.

    python3 benchmarks/pool_properties.py real --pacs pacs.zip --midog midog.zip --weights vit.safetensors --work W
    python3 benchmarks/pool_properties.py phantom demo
    python3 benchmarks/pool_properties.py table      # from the record

Real experts are those of two_cores.py: a ViT-S/14 whose last three blocks are fine-tuned. "Whole network" rows are from
records: ViT-S/14 fine-tuned on a GPU. Accuracies are balanced over classes.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import two_cores
from provenance import provenance
from torch import Tensor

import mergestream as ms
from mergestream.bench.demo import FULL
from mergestream.bench.drift.pool_drift import Drift, analyse_drift
from mergestream.functional.metrics import summarise
from mergestream.training.training_loop import split_of

RESULTS, DRIFT = Path(__file__).parent / "results", Path(__file__).parent.parent / "docs" / "results"
RECORD, WHOLE = RESULTS / "pool_properties.json", RESULTS / "real" / "2026-11-16-later.json"
IMAGES = 700  # per target, at most
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

    def sample(self) -> tuple[Tensor, Tensor]:
        chosen = np.sort(np.random.RandomState(0).permutation(len(self.labels))[:IMAGES])
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


def properties(pool: ms.ExpertPool, sites: dict[str, Site], drift: Drift) -> dict[str, float]:
    """Means over experts, over pairs, and over targets that are each left out of the average."""
    home, abroad, averages, ensembles = [], [], [], []
    for target, site in sites.items():
        answers = expert_answers(pool, site.images[site.validation])[pool.index(target)]
        home.append(score(answers, site.labels[site.validation], pool))
        others, (images, labels) = pool.without(target), site.sample()
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
    place = two_cores.Place(two_cores.NETWORKS["small"], arguments.weights, arguments.work, 0)
    for dataset in arguments.datasets.split(","):
        data = two_cores.tokens_of(dataset, getattr(arguments, dataset), place)
        for start in arguments.heads.split(","):
            experts = {name: two_cores.expert_of(dataset, name, start, data, place) for name in data["domains"]}
            sites = {name: Site(own["x"], own["y"], experts[name]["val"]) for name, own in data["domains"].items()}
            pool = two_cores.pool_of(experts, data, dataset, place)
            classes, modules = tuple(data["classes"]), {}
            for name, expert in experts.items():
                modules[name.replace(" ", "_")] = place.tail(len(classes))
                modules[name.replace(" ", "_")].load_state_dict(expert["state"])
            base = place.tail(len(classes))
            with tempfile.TemporaryDirectory() as folder:
                ms.ExpertPool.from_modules(modules, base=base, classes=classes, head="head").save(folder)
                drift = analyse_drift(folder, network=base)
            yield f"{dataset}, {start} heads, last blocks", properties(pool, sites, drift)


def phantom_pools(folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
    dataset = ms.load_dataset("phantom", images=FULL.images)
    for seed in FULL.seeds:
        path = folder / ("pool" if seed == 0 else f"pool-seed{seed}")
        pool, sites = ms.ExpertPool.load(path), {}
        for name, recipe in ((card.name, card.recipe) for card in pool.cards):
            sites[name] = Site(dataset[name].images, dataset[name].labels, split_of(dataset[name], recipe)[1])
        yield f"phantoms, seed {seed}", properties(pool, sites, analyse_drift(path))


def recorded_pools() -> dict[str, dict[str, float]]:
    """Properties of whole ViT-S/14, fine-tuned on a GPU, as far as records hold them; means over seeds."""
    groups = json.loads(WHOLE.read_text(encoding="utf-8"))["groups"]
    result: dict[str, dict[str, float]] = {}
    for dataset, loss in (("pacs", "plain"), ("midog", "weighted")):
        for start in two_cores.STARTS:
            own = [
                each
                for each in groups
                if (each["dataset"], each.get("loss"), each["head_init"]) == (dataset, loss, start)
            ]
            experts = [each for group in own if group["kind"] == "train" for each in group["experts"].values()]
            rows = [row for group in own if group["kind"] == "main" for row in group["rows"]]
            properties = {"home": mean(each["balanced_accuracy"] for each in experts)}
            properties["temperature"] = mean(each["temperature"] for each in experts)
            properties["mean"], ensemble, alone = (_iid(rows, name) for name in ("mean", "ensemble", "single_expert("))
            properties |= {"drop": properties["home"] - alone, "mean_less_ensemble": properties["mean"] - ensemble}
            drift = DRIFT / f"drift-{dataset}-{start}.json"
            properties |= angles(Drift.load(drift)) if drift.exists() else {}
            result[f"{dataset}, {start} heads, whole network"] = properties
    return result


def _iid(rows: list[dict[str, Any]], method: str) -> float:
    """Balanced accuracy of a method, or of all whose label begins so, on the plain iid stream."""
    chosen = [row for row in rows if (row["stream"], row["condition"]) == ("iid", "")]
    return mean(row["balanced_accuracy"] for row in chosen if row["method"].startswith(method))


def table(record: dict[str, Any]) -> str:
    """Real pools and the phantoms; a phantom's value outside the range of several real pools is bold."""
    real = recorded_pools() | record.get("real", {"pools": {}})["pools"]
    phantom = record["phantom"]["pools"]
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
    for name in ("--pacs", "--midog", "--weights", "--work"):
        real.add_argument(name, type=Path, required=True)
    real.add_argument("--datasets", default="pacs,midog")
    real.add_argument("--heads", default=",".join(two_cores.STARTS))
    phantom.add_argument("folder", type=Path)
    commands.add_parser("table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    if arguments.command != "table":
        pools = real_pools(arguments) if arguments.command == "real" else phantom_pools(arguments.folder)
        record[arguments.command] = {"about": provenance(), "pools": dict(pools)}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if "phantom" in record:
        print(table(record))


if __name__ == "__main__":
    main()
