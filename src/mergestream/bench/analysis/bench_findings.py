"""Everything that a benchmark's tables and reports show: ranks, subgroups, and all findings as one record."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mergestream.bench.analysis.comparison import Duel, Pairing, ResultRow, pairing_of, streams_of
from mergestream.bench.analysis.group_intervals import GroupedRow
from mergestream.bench.analysis.run_checks import Collapse, collapses, describe_collapses, line_of, majority_shares
from mergestream.bench.records import Run
from mergestream.pool.expert_card import library_versions

SubgroupKey = tuple[str, str, str, str]  # label, stream, kind, value
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Standing:
    """A method's mean rank on one stream over (target, seed, pool), 1 for the best, with its wins and losses."""

    label: str
    stream: str
    mean_rank: float
    wins: int
    losses: int


def rank_methods(runs: Sequence[Run], metric: str = "accuracy") -> list[Standing]:
    """Rank the methods; equal values share a rank. Cells without all methods are left out, so that ranks compare."""
    standings: list[Standing] = []
    for stream in streams_of(runs):
        here = [run for run in runs if run.arguments["stream"]["name"] == stream]
        labels = list(dict.fromkeys(run.arguments["label"] for run in here))
        table: dict[Pairing, dict[str, float]] = defaultdict(dict)
        for run in here:
            table[pairing_of(run)][run.arguments["label"]] = run.metrics[metric]
        values = np.array([[row[label] for label in labels] for row in table.values() if len(row) == len(labels)])
        if not len(values):
            continue
        above = (values[:, :, None] > values[:, None, :]).sum(axis=2)  # [cells, methods]: how many it beats
        below = (values[:, :, None] < values[:, None, :]).sum(axis=2)
        ranks = 1 + below + (len(labels) - 1 - above - below) / 2
        for m, label in enumerate(labels):
            standings.append(
                Standing(label, stream, float(ranks[:, m].mean()), int(above[:, m].sum()), int(below[:, m].sum()))
            )
    return standings


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
    groups: dict[SubgroupKey, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for run in runs:
        label, stream = run.arguments["label"], run.arguments["stream"]["name"]
        for kind, values in run.metrics.get("subgroups", {}).items():
            for value, report in values.items():
                groups[label, stream, kind, value].append((run.arguments["seed"], report))
    return [_subgroup_row(key, entries) for key, entries in groups.items()]


def _subgroup_row(key: SubgroupKey, entries: list[tuple[int, dict[str, Any]]]) -> SubgroupRow:
    reports = [report for _, report in entries]
    sizes = np.array([report["images"] for report in reports])

    def mean(metric: str) -> float | None:
        defined = [report[metric] is not None for report in reports]
        values = [report[metric] for report in reports if report[metric] is not None]
        return float(np.average(values, weights=sizes[defined])) if values else None

    seeds = len({seed for seed, _ in entries})
    images = int(sizes.sum() / seeds)
    return SubgroupRow(*key, mean("accuracy"), mean("balanced_accuracy"), mean("auroc"), images)


@dataclass(frozen=True)
class BenchFindings:
    """Results of a benchmark with the plan and command that gave them."""

    plan: dict[str, Any]
    command: str
    rows: list[ResultRow]
    duels: list[Duel]
    standings: list[Standing]
    majority_shares: dict[str, float]
    subgroups: list[SubgroupRow]
    collapses: list[Collapse]
    left_out: list[tuple[str, str]]
    warnings: list[str]
    runs: list[dict[str, Any]]
    dataset: str
    synthetic: bool
    network: str
    grouped: list[GroupedRow] = field(default_factory=list)  # where the data name slides or patients

    @classmethod
    def of(cls, runs: Sequence[Run], rows: list[ResultRow], duels: list[Duel], **about: Any) -> "BenchFindings":
        """Findings of a benchmark's runs; `about` are the fields that the runs do not tell."""
        merged = [run for run in runs if run.arguments["method"] != "single_expert"]
        return cls(
            rows=rows,
            duels=duels,
            standings=rank_methods(merged),
            majority_shares=majority_shares(runs),
            subgroups=subgroup_rows(merged),
            collapses=collapses(runs),
            runs=[line_of(run) for run in runs],
            **about,
        )

    @property
    def sentences(self) -> list[str]:
        """Warnings to read beside the tables."""
        left_out = [f"Left out: {label}. {reason}" for label, reason in self.left_out]
        return [*self.warnings, *left_out, *describe_collapses(self.collapses)]

    def to_json(self) -> dict[str, Any]:
        """All fields but `runs`, which are in results.csv."""
        fields = asdict(self)
        del fields["runs"]
        if not self.grouped:
            del fields["grouped"]
        fields["results"] = fields.pop("rows")
        fields["left_out"] = [{"method": label, "why": reason} for label, reason in self.left_out]
        return {"schema_version": SCHEMA_VERSION, **fields, "environment": library_versions()}
