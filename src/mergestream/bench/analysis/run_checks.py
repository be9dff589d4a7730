"""Checks and key figures of a set of runs: skew, few batches, leakage, vanished classes."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mergestream.bench.records import Run
from mergestream.functional.intervals import FEW_BATCHES

# A class is common from this share of the labels, and rarely predicted below this share of the experts' answers.
COMMON, RARE = 0.05, 0.01


def majority_shares(runs: Sequence[Run]) -> dict[str, float]:
    """Share of the most common class in a batch, per stream: mean over targets and seeds."""
    shares: dict[str, dict[str, float]] = {}
    for run in runs:
        stream = run.arguments["stream"]
        own = shares.setdefault(stream["name"], {})
        if stream["hash"] not in own:
            own[stream["hash"]] = run.majority_share
    return {name: float(np.mean(list(own.values()))) for name, own in shares.items()}


def few_batches(runs: Sequence[Run]) -> list[str]:
    """A warning if intervals rest on too few batches."""
    few = {run.arguments["data"]["domain"]: len(run.batches) for run in runs if len(run.batches) < FEW_BATCHES}
    if not few:
        return []
    counts = ", ".join(f"{target} ({count})" for target, count in few.items())
    return [f"Few batches per run at {counts}: the intervals are rough. Use smaller batches or more images."]


def seen_targets(runs: Sequence[Run]) -> list[str]:
    """A warning if a pool holds an expert with a target's name: it may have been trained there."""
    seen = {
        domain
        for run in runs
        for domain in run.arguments["data"]["domain"].split("+")
        if domain in run.arguments["pool"]["experts"]
    }
    if not seen:
        return []
    return [f"Leakage: experts of {', '.join(sorted(seen))} were in the pool that answered there: no unseen site."]


def line_of(run: Run) -> dict[str, Any]:
    """One run as a line of results.csv."""
    arguments = run.arguments
    numbers = {key: value for key, value in run.metrics.items() if value is None or isinstance(value, int | float)}
    recalls = {f"recall.{name}": value for name, value in run.metrics["recall"].items()}
    return {
        "run": run.hash,
        "method": arguments["method"],
        "label": arguments["label"],
        "target": arguments["data"]["domain"],
        "stream": arguments["stream"]["name"],
        "seed": arguments["seed"],
        "dataset": arguments["data"]["dataset"],
        "batches": arguments["stream"]["batches"],
        "batch_size": arguments.get("batch_size", max(map(len, run.batches))),
        "options": json.dumps(arguments["options"]),
        "pool": arguments["pool"]["fingerprint"][:16],
        "experts": len(arguments["pool"]["experts"]),
        **numbers,
        **recalls,
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
        arguments = run.arguments
        for each in run.metrics.get("collapsed", []) if arguments["method"] != "single_expert" else []:
            where = arguments["label"], arguments["stream"]["name"], arguments["data"]["domain"], arguments["seed"]
            vanished.append(Collapse(*where, each["class"], each["share"], each["experts"]))
    return vanished


def describe_collapses(collapses: Sequence[Collapse]) -> list[str]:
    """One sentence per method and class: at which targets, on which streams, and the worst case."""
    groups: dict[tuple[str, str], list[Collapse]] = defaultdict(list)
    for each in collapses:
        groups[each.label, each.class_name].append(each)
    sentences = []
    for (label, class_name), group in groups.items():
        targets, streams = (", ".join(dict.fromkeys(getattr(c, key) for c in group)) for key in ("target", "stream"))
        worst = min(group, key=lambda c: c.share / c.experts)
        sentences.append(
            f"{label}: the class '{class_name}' has nearly vanished at {targets} ({streams}); at worst it is "
            f"{100 * worst.share:.1f} % of the answers at {worst.target}, {100 * worst.experts:.1f} % of the experts'."
        )
    return sentences


def unpredicted_classes(runs: Sequence[Run]) -> list[str]:
    """Sentences on common classes that the experts alone hardly ever predict, so that merging is not to blame."""
    single = [run for run in runs if run.arguments["method"] == "single_expert"]
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
