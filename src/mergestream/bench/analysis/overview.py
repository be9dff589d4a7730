"""Checks and key figures of a set of runs, to read before their results."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from mergestream.bench.records import Run
from mergestream.functional.intervals import FEW_BATCHES


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
