"""Blocks about the constants of the correction, from benchmarks/correction_choice.py and benchmarks/slide_shifts.py."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SETS = {"pacs": "PACS", "midog": "MIDOG"}
METHODS = ("corrected", "merge_and_fit")
METRICS = ("accuracy", "balanced_accuracy")
Row = Mapping[str, Any]


def correction_blocks() -> dict[str, Callable[[], str]]:
    return {"constants": constants_table, "slide-shifts": slide_shifts, "batch-bias": batch_bias_table}


def batch_bias_table() -> str:
    """Points of accuracy ahead of the ensemble with views with each allowance: mean over targets and lowest target."""
    rules = ("merge_and_fit", "merge_once(ask_first=256)")
    methods = [text for rule in rules for text in (rule, with_option(rule, "batch_bias=0.6"))]
    lines = [f"| pool | stream | batch | {' | '.join(methods)} |", "|---|---|---:|" + "---:|" * len(methods)]
    for file in sorted((RESULTS / "batch_bias").glob("*.json")):
        table = json.loads(file.read_text(encoding="utf-8"))["rows"]
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        name, heads = file.stem.split("-")[:2]
        for stream, batch in dict.fromkeys((row["stream"], row["batch"]) for row in rows):
            here = [row for row in rows if (row["stream"], row["batch"]) == (stream, batch)]
            ahead = [list(ahead_of_ensemble(here, method).values()) for method in methods]
            cells = [f"{np.mean(points):+.1f}/{min(points):+.1f}" for points in ahead]
            lines.append(f"| {SETS[name]}, {heads} | {stream} | {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_option(method: str, option: str) -> str:
    return f"{method[:-1]}, {option})" if method.endswith(")") else f"{method}({option})"


def ahead_of_ensemble(rows: Sequence[Row], method: str) -> dict[str, float]:
    """By target, mean over stream seeds."""
    by_target: dict[str, list[float]] = {}
    for sign, name in ((100, method), (-100, "ensemble(views=hflip)")):
        for row in rows:
            if row["method"] == name:
                by_target.setdefault(row["target"], []).append(sign * row["accuracy"])
    return {target: 2 * float(np.mean(values)) for target, values in by_target.items()}


def constants_table() -> str:
    """The product's constants less those chosen without the target, in points, mean over targets; and the worst."""
    lines = [
        "| pool | stream | batch | corrected, accuracy/balanced | merge_and_fit | lowest at a target |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for file in sorted((RESULTS / "correction_choice").glob("*.json")):
        table = json.loads(file.read_text(encoding="utf-8"))["rows"]
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        name, heads = file.stem.split("-")
        for stream, batch in dict.fromkeys((row["stream"], row["batch"]) for row in rows):
            here = [row for row in rows if (row["stream"], row["batch"]) == (stream, batch)]
            points = {(method, metric): gains(here, method, metric) for method in METHODS for metric in METRICS}
            cells = ["/".join(f"{np.mean(points[method, metric]):+.1f}" for metric in METRICS) for method in METHODS]
            lowest = min(points["merge_and_fit", "accuracy"])
            lines.append(f"| {SETS[name]}, {heads} | {stream} | {batch} | {' | '.join(cells)} | {lowest:+.1f} |")
    return "\n".join(lines)


def gains(rows: Sequence[Row], method: str, metric: str) -> list[float]:
    """Points that the product's constants are ahead of the chosen ones, for every target."""
    values = {(row["target"], row["constants"]): row[metric] for row in rows if row["method"] == method}
    return [100 * (values[target, "own"] - values[target, "chosen"]) for target, kind in values if kind == "own"]


def slide_shifts() -> str:
    rows = json.loads((RESULTS / "slide_shifts.json").read_text(encoding="utf-8"))["rows"]
    pools = list(dict.fromkeys(row["pool"] for row in rows))
    lines = [
        f"| nats, shared by all experts/own | slides | {' | '.join(pool.split('-')[1] + ' heads' for pool in pools)} |",
        "|---|---:|" + "---:|" * len(pools),
    ]
    for target in dict.fromkeys(row["target"] for row in rows):
        own = {row["pool"]: row for row in rows if row["target"] == target}
        cells = [f"{own[pool]['shared_nats']:.2f}/{own[pool]['own_nats']:.2f}" for pool in pools]
        lines.append(f"| {target.replace('_', ' ')} | {own[pools[0]]['slides']} | {' | '.join(cells)} |")
    return "\n".join(lines)
