"""Everything that a benchmark's tables and reports show: ranks, subgroups, warnings, and all findings as one record."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mergestream.bench.analysis.comparison import (
    EXPERT_ROWS,
    METRICS,
    GroupedRow,
    Pairing,
    ResultRow,
    grouped,
    pairing_of,
    rows_of,
)
from mergestream.bench.analysis.duels import Duel, duel
from mergestream.bench.records import Run
from mergestream.functional.intervals import FEW_BATCHES
from mergestream.pool.expert_card import library_versions

RESULTS_VERSION = 2  # of results.json
# A class is common from this share of the labels, and rarely predicted below this share of the experts' answers.
COMMON, RARE = 0.05, 0.01


@dataclass(frozen=True)
class MethodRank:
    """A method's mean rank on one stream over (target, pool, stream seed), 1 for the best, with its wins and losses."""

    label: str
    stream: str
    mean_rank: float
    wins: int
    losses: int


def rank_methods(runs: Sequence[Run]) -> list[MethodRank]:
    """Rank by accuracy; equal values share a rank. Cells without all methods are left out, so that ranks compare."""
    standings: list[MethodRank] = []
    for stream, here in grouped(runs, "stream").items():
        labels = list(dict.fromkeys(run.label for run in here))
        table: dict[Pairing, dict[str, float]] = defaultdict(dict)
        for run in here:
            table[pairing_of(run)][run.label] = run.accuracy
        values = np.array([[row[label] for label in labels] for row in table.values() if len(row) == len(labels)])
        if not len(values):
            continue
        above = (values[:, :, None] > values[:, None, :]).sum(axis=2)  # [cells, methods]: how many it beats
        below = (values[:, :, None] < values[:, None, :]).sum(axis=2)
        ranks = 1 + below + (len(labels) - 1 - above - below) / 2
        for m, label in enumerate(labels):
            standings.append(
                MethodRank(label, stream, float(ranks[:, m].mean()), int(above[:, m].sum()), int(below[:, m].sum()))
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
    groups: dict[tuple[str, str, str, str], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for run in runs:
        for kind, values in run.metrics.get("subgroups", {}).items():
            for value, report in values.items():
                groups[run.label, run.stream, kind, value].append((run.stream_seed, report))
    rows = []
    for key, entries in groups.items():
        means: dict[str, Any] = {}
        for metric in METRICS:
            defined = [(report[metric], report["images"]) for _, report in entries if report[metric] is not None]
            values, sizes = zip(*defined, strict=True) if defined else ((), ())
            means[metric] = float(np.average(values, weights=sizes)) if defined else None
        images = sum(report["images"] for _, report in entries) / len({seed for seed, _ in entries})
        rows.append(SubgroupRow(*key, **means, images=int(images)))
    return rows


def majority_shares(runs: Sequence[Run]) -> dict[str, float]:
    """Share of the most common class in a batch, per stream: mean over targets and seeds."""
    shares = {}
    for name, here in grouped(runs, "stream").items():
        distinct = {run.arguments["stream"]["hash"]: run for run in reversed(here)}
        shares[name] = float(np.mean([run.majority_share for run in distinct.values()]))
    return shares


def few_batches(runs: Sequence[Run]) -> list[str]:
    """A warning if intervals rest on too few batches."""
    few = {run.target: len(run.batches) for run in runs if len(run.batches) < FEW_BATCHES}
    counts = ", ".join(f"{target} ({count})" for target, count in few.items())
    sentence = f"Few batches per run at {counts}: the intervals are rough. Use smaller batches or more images."
    return [sentence] if few else []


def seen_targets(runs: Sequence[Run]) -> list[str]:
    """A warning if a pool holds an expert with a target's name: it may have been trained there."""
    seen = {name for run in runs for name in run.target.split("+") if name in run.arguments["pool"]["experts"]}
    names = ", ".join(sorted(seen))
    return [f"Leakage: experts of {names} were in the pool that answered there: no unseen site."] if seen else []


def line_of(run: Run) -> dict[str, Any]:
    """One run as a line of results.csv."""
    arguments = run.arguments
    numbers = {key: value for key, value in run.metrics.items() if value is None or isinstance(value, int | float)}
    by_class = {"recall": run.metrics["recall"], "calibration": run.metrics["calibration_by_class"]}
    per_class = {f"{key}.{name}": value for key, values in by_class.items() for name, value in values.items()}
    return {
        "run": run.hash,
        "method": arguments["method"],
        "label": run.label,
        "target": run.target,
        "stream": run.stream,
        "stream_seed": run.stream_seed,
        "dataset": arguments["data"]["dataset"],
        "batches": arguments["stream"]["batches"],
        "batch_size": arguments.get("batch_size", max(map(len, run.batches))),
        "options": json.dumps(arguments["options"]),
        "pool": arguments["pool"]["fingerprint"][:16],
        "experts": len(arguments["pool"]["experts"]),
        **numbers,
        **per_class,
        "majority_share": run.majority_share,
        "seconds_per_step": run.seconds_per_step,
    }


@dataclass(frozen=True)
class Collapse:
    """A class that a merged model hardly predicts at one target, although every expert does."""

    label: str
    stream: str
    target: str
    seed: int
    class_name: str
    share: float
    experts: float


def collapses(runs: Iterable[Run]) -> list[Collapse]:
    """Every class that vanished in a run; runs of single experts are not checked."""
    vanished = []
    for run in runs:
        for each in [] if run.is_single else run.metrics.get("collapsed", []):
            where = run.label, run.stream, run.target, run.stream_seed
            vanished.append(Collapse(*where, each["class"], each["share"], each["experts"]))
    return vanished


def describe_collapses(collapses: Sequence[Collapse]) -> list[str]:
    """One sentence per method and class: at which targets, on which streams, and the worst case."""
    sentences = []
    for (label, class_name), group in grouped(collapses, "label", "class_name").items():
        targets, streams = (", ".join(dict.fromkeys(getattr(c, key) for c in group)) for key in ("target", "stream"))
        worst = min(group, key=lambda c: c.share / c.experts)
        sentences.append(
            f"{label}: the class '{class_name}' has nearly vanished at {targets} ({streams}); at worst it is "
            f"{100 * worst.share:.1f} % of the answers at {worst.target}, {100 * worst.experts:.1f} % of the experts'."
        )
    return sentences


def unpredicted_classes(runs: Sequence[Run]) -> list[str]:
    """Sentences on common classes that the experts alone hardly ever predict, so that merging is not to blame."""
    single = [run for run in runs if run.is_single]
    if not single:
        return []
    matrix = np.sum([run.metrics["confusion"] for run in single], axis=0)
    labels, answers = (matrix.sum(axis=axis) / matrix.sum() for axis in (1, 0))
    return [
        f"The experts alone hardly ever predict '{name}': {100 * answers[c]:.1f} % of their answers, "
        f"{100 * labels[c]:.1f} % of the labels. The check for vanished classes needs experts that do; see the recall "
        f"per class."
        for c, name in enumerate(single[0].classes)
        if labels[c] >= COMMON and answers[c] < RARE
    ]


@dataclass(frozen=True)
class BenchFindings:
    """Results of a benchmark with the plan and command that gave them."""

    plan: dict[str, Any]
    command: str
    rows: list[ResultRow]
    duels: list[Duel]
    standings: list[MethodRank]
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
    def of(
        cls,
        runs: Sequence[Run],
        ours: str,
        *,
        dataset: str,
        overlap: str,
        warnings: Iterable[str],
        on_duel: Callable[[], None] = lambda: None,
        **about: Any,
    ) -> "BenchFindings":
        """Compare `ours` with all other methods; `about` are the fields that the runs do not tell.

        `overlap` says which of the data set's images are also elsewhere; warnings that the runs give are added.
        """
        merged = [run for run in runs if not run.is_single]
        duels: list[Duel] = []
        for theirs in dict.fromkeys(run.label for run in merged if run.label != ours):
            duels += duel(merged, ours, theirs)
            on_duel()
        overlaps = [f"'{dataset}': {overlap}"] if overlap else []
        return cls(
            rows=rows_of(runs),
            duels=duels,
            dataset=dataset,
            warnings=list(dict.fromkeys([*warnings, *overlaps, *few_batches(runs), *unpredicted_classes(runs)])),
            standings=rank_methods(merged),
            majority_shares=majority_shares(runs),
            subgroups=subgroup_rows(merged),
            collapses=collapses(runs),
            runs=[line_of(run) for run in runs],
            **about,
        )

    @property
    def streams(self) -> list[str]:
        return list(dict.fromkeys(row.stream for row in self.rows))

    @property
    def labels(self) -> list[str]:
        """Row names of the tables: methods and the two expert rows."""
        return list(dict.fromkeys(row.label for row in self.rows))

    @property
    def methods(self) -> list[str]:
        return [label for label in self.labels if label not in EXPERT_ROWS]

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
        return {"schema_version": RESULTS_VERSION, **fields, "environment": library_versions()}
