"""Results on subgroups that a data set names, such as scanners or species."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mergestream.bench.records import Run

Key = tuple[str, str, str, str]  # label, stream, kind, value


@dataclass(frozen=True)
class SubgroupRow:
    """One method on one subgroup, such as the images of one scanner: the mean over the runs that have any."""

    label: str
    stream: str
    kind: str
    value: str
    accuracy: float | None
    balanced_accuracy: float | None
    auroc: float | None
    images: int  # over all targets and pools, for one seed


def subgroup_rows(runs: Iterable[Run]) -> list[SubgroupRow]:
    """One row per (label, stream, kind, value). Runs are weighted by their number of such images."""
    groups: dict[Key, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for run in runs:
        label, stream = run.arguments["label"], run.arguments["stream"]["name"]
        for kind, values in run.metrics.get("subgroups", {}).items():
            for value, report in values.items():
                groups[label, stream, kind, value].append((run.arguments["seed"], report))
    return [_subgroup_row(key, entries) for key, entries in groups.items()]


def _subgroup_row(key: Key, entries: list[tuple[int, dict[str, Any]]]) -> SubgroupRow:
    reports = [report for _, report in entries]
    sizes = np.array([report["images"] for report in reports])

    def mean(metric: str) -> float | None:
        defined = [report[metric] is not None for report in reports]
        values = [report[metric] for report in reports if report[metric] is not None]
        return float(np.average(values, weights=sizes[defined])) if values else None

    seeds = len({seed for seed, _ in entries})
    images = int(sizes.sum() / seeds)
    return SubgroupRow(*key, mean("accuracy"), mean("balanced_accuracy"), mean("auroc"), images)
