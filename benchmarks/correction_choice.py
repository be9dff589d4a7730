"""The constants of the correction, chosen for every target without any image or label of it.

    python3 benchmarks/correction_choice.py --pool pacs-shared-5.npz midog-shared-5.npz --out RECORD.json

From what `real_pools.py` stored. For each target the other domains are pseudo-targets, answered by the experts of the
rest. There every constant gets the value with the best score, the others as the product has them. The target then runs
with the product's constants and with those chosen. The score: the mean of accuracy and balanced accuracy over methods,
streams and pseudo-targets.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from provenance import provenance
from real_pools import Setting
from real_streams import METRICS, StoredAnswers, StoredPool, Subject, as_table, in_order

import mergestream as ms
from mergestream.functional.metrics import summarise
from mergestream.methods import correction

# Values to choose from; the product's own are among them.
CONSTANTS: Mapping[str, tuple[float, ...]] = {
    "BATCH_BIAS": (0.0, 0.15, 0.3, 0.6),
    "CORRELATED_BEFORE": (0.002, 0.01, 0.05),
    "RECENT_IMAGES": (2.0, 8.0, 32.0),
    "NEAR_IMAGES": (32.0, 128.0, 512.0),
    "HOME_IMAGES": (8.0, 32.0, 128.0),
}
METHODS = ("corrected", "merge_and_fit")
STREAMS = {
    "pacs": ("iid", "dirichlet:0.05", "sorted", "missing:3", "prevalence:0.1:0"),
    "midog": ("iid", "dirichlet:0.05", "slides", "prevalence:0.05", "prevalence:0.5"),
}
SIZES = (32, 4)
Values = Mapping[str, float]


def own_values() -> dict[str, float]:
    return {name: getattr(correction, name) for name in CONSTANTS}


@contextmanager
def constants(values: Values) -> Iterator[None]:
    """The correction with other constants."""
    before = own_values()
    vars(correction).update(values)
    try:
        yield
    finally:
        vars(correction).update(before)


def settings(dataset: str) -> list[Setting]:
    return [Setting(stream, size) for stream in STREAMS[dataset] for size in SIZES]


def scores(subject: Subject, dataset: str, values: Values) -> list[dict[str, Any]]:
    """Every method on every stream, with these constants."""
    rows = []
    with constants(values):
        for setting in settings(dataset):
            batches = subject.stream(setting)
            truth = in_order(subject.labels, batches)
            for method in METHODS:
                ran = subject.run(method, setting, batches)
                assert ran is not None
                report = summarise(ran[0], truth, subject.pool.classes)
                own = {metric: report[metric] for metric in METRICS}
                rows.append({"stream": setting.stream, "batch": setting.size, "method": method, **own})
    return rows


def candidates() -> list[dict[str, float]]:
    """The product's constants, and each of them at every other value."""
    own = own_values()
    return [own, *({**own, name: v} for name, values in CONSTANTS.items() for v in values if v != own[name])]


def at_pseudo_target(path: Path, site: str, target: str) -> tuple[str, list[float]]:
    """The target, and the score of each candidate at one of its pseudo-targets."""
    torch.set_num_threads(1)
    stored = StoredPool.load(path)
    dataset, subject = stored.about["dataset"], stored.subject((site,), (site, target))
    tables = [scores(subject, dataset, values) for values in candidates()]
    return target, [mean((row["accuracy"] + row["balanced_accuracy"]) / 2 for row in rows) for rows in tables]


def chosen(by_site: Sequence[Sequence[float]]) -> dict[str, float]:
    """The best value of each constant by its mean score over pseudo-targets; the product's own where none is better."""
    own, average = own_values(), [mean(column) for column in zip(*by_site, strict=True)]
    best = dict.fromkeys(CONSTANTS, average[0])
    result = dict(own)
    for values, score in zip(candidates()[1:], average[1:], strict=True):
        (name,) = (name for name in CONSTANTS if values[name] != own[name])
        if score > best[name]:
            best[name], result[name] = score, values[name]
    return result


def at_target(path: Path, target: str, values: Values) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    stored = StoredPool.load(path)
    subject, about = stored.subject((target,), (target,)), {"pool": stored.name, "target": target}
    dataset = stored.about["dataset"]
    both = {"own": own_values(), "chosen": values}
    rows = [{**about, "constants": kind, **row} for kind, own in both.items() for row in scores(subject, dataset, own)]
    return [{key: round(v, 5) if isinstance(v, float) else v for key, v in row.items()} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pool", type=Path, nargs="+", required=True, help="files of real_pools.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows, choices = list[dict[str, Any]](), list[dict[str, Any]]()
    with ProcessPoolExecutor(given.jobs, initializer=ms.register_method, initargs=(StoredAnswers,)) as workers:
        for path in given.pool:
            names = StoredPool.load(path).names
            pairs = [(site, target) for target in names for site in names if site != target]
            by_target: dict[str, list[list[float]]] = defaultdict(list)
            for target, own in workers.map(at_pseudo_target, *zip(*((path, *pair) for pair in pairs), strict=True)):
                by_target[target].append(own)
            picked = {target: chosen(own) for target, own in by_target.items()}
            choices += [{"pool": path.stem, "target": target, **values} for target, values in picked.items()]
            for own_rows in workers.map(at_target, *zip(*((path, *pair) for pair in picked.items()), strict=True)):
                rows += own_rows
            print(f"{path.stem}: {picked}", flush=True)
    about = {"about": provenance(), "own": own_values(), "candidates": {k: list(v) for k, v in CONSTANTS.items()}}
    head = json.dumps(about, indent=1).removesuffix("\n}")
    tables = [f'"{name}": {as_table(table)}' for name, table in {"choices": choices, "rows": rows}.items()]
    given.out.write_text(",\n".join([head, *tables]) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
