"""What should be known of a set of runs before their numbers are read."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from mergestream.bench.records import Run
from mergestream.functional.metrics import FEW_BATCHES


def majority_shares(runs: Sequence[Run]) -> dict[str, float]:
    """How skewed each stream's batches really were, mean over targets and seeds."""
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        stream = run.arguments["stream"]
        of_stream = found.setdefault(stream["name"], {})
        if stream["hash"] not in of_stream:
            of_stream[stream["hash"]] = run.majority_share
    return {name: float(np.mean(list(shares.values()))) for name, shares in found.items()}


def few_batches(runs: Sequence[Run]) -> list[str]:
    """A sentence where intervals rest on too few batches."""
    few = {run.arguments["data"]["domain"]: len(run.batches) for run in runs if len(run.batches) < FEW_BATCHES}
    told = ", ".join(f"{target} ({count})" for target, count in few.items())
    return (
        [f"Few batches a run at {told}: the intervals are rough. Take smaller batches or more images."] if few else []
    )


def seen_targets(runs: Sequence[Run]) -> list[str]:
    """A sentence where a pool holds an expert that bears a target's name: it may have been trained on it."""
    found = {
        domain
        for run in runs
        for domain in run.arguments["data"]["domain"].split("+")
        if domain in run.arguments["pool"]["experts"]
    }
    told = ", ".join(sorted(found))
    return (
        [f"Leakage: experts of {told} were in the pool that answered there. Not results at an unseen site."]
        if found
        else []
    )


def line_of(run: Run) -> dict[str, Any]:
    """One run in one line of a table."""
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
