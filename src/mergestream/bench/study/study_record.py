"""The record of a study: small groups of rows with encoded bootstrap draws, one group per stage and pool."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mergestream.bench.analysis.comparison import grouped, mean_draws
from mergestream.bench.analysis.cost import forwards_of
from mergestream.bench.records import Run
from mergestream.bench.study.results_plan import LIFE, OURS, PoolRecipe, Stage
from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.files import read_json, write_text

SCHEMA_VERSION = 1
LEVELS = 65535  # scores from 0 to 1 are stored as 16-bit numbers: finer than a hundredth of a point
SINGLE = "single_expert"
SCORES = ("accuracy", "balanced_accuracy", "auroc")
PROBABILITIES = ("nll", "brier", "ece", "calibration_in_the_large")
MOST_DRAWS = 200  # per target; a difference resamples targets and seeds as well
# Kinds of stages with intervals; draws count every image once, which a long stream repeats.
DRAWN = ("main", "streams", "ablation", *(kind for kind in LIFE if kind != "long"))
Group = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A stream and its condition, such as the batch size."""

    stream: str
    condition: str = ""

    def __str__(self) -> str:
        return f"{self.stream}, {self.condition}" if self.condition else self.stream


def encoded(values: np.ndarray) -> str:
    return base64.b64encode(np.round(values * LEVELS).astype("<u2").tobytes()).decode()


def decoded(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<u2").astype(np.float64) / LEVELS


def group_of(
    stage: Stage,
    pool: PoolRecipe,
    fingerprint: str,
    runs: Sequence[Run],
    *,
    left_out: Mapping[str, str],
    resamples: int,
) -> Group:
    """All runs of one pool at one stage: rows, and every method's draws at each target."""
    alone = {(run.arguments["options"]["expert"], *_place(run)): run for run in runs if run.is_single}
    shown = [run for run in runs if stage.kind in ("main", "costs") or not run.is_single]
    drawn = [run for run in shown if stage.draws_at in (None, run.arguments["batch_size"])]
    rows, more = [_row(run) for run in shown], dict[str, Any]()
    if stage.kind == "hostile":
        for row, run in zip(rows, shown, strict=True):
            loud = alone[run.arguments["pool"]["experts"][0], *_place(run)]
            row["agrees_with_loud"] = round(float((run.predictions == loud.predictions).double().mean()), 6)
        more = {"loud": runs[0].arguments["pool"]["experts"][0]}
    if stage.kind == "costs":
        costs: dict[str, Any] = {}
        for run in shown:
            costs.setdefault(run.arguments["method"], _cost(run))
        rows, more = [], {"costs": list(costs.values())}
    answers: dict[str, dict[str, list[int]]] = {}  # how often each expert alone predicts each class, by target
    for (expert, target, _), run in alone.items():
        answers.setdefault(target, {})[expert] = _counts(run)
    return {
        "stage": stage.name,
        "kind": stage.kind,
        "pool": pool.name,
        **asdict(pool),
        "fingerprint": fingerprint,
        "ours": OURS,
        "seconds": round(sum(row["seconds"] for row in rows), 2),
        "classes": list(runs[0].classes),
        "experts": answers,
        "left_out": dict(left_out),
        "rows": rows,
        "resamples": _draws(drawn, resamples) if stage.kind in DRAWN else {},
        **more,
    }


def _place(run: Run) -> tuple[str, str]:
    """The target and the stream there."""
    return run.target, run.arguments["stream"]["hash"]


def _row(run: Run) -> dict[str, Any]:
    stream, _, condition = run.stream.partition(", ")
    scores = {metric: run.metrics.get(metric) for metric in (*SCORES, *PROBABILITIES)}
    if "lone_sensitivity" in run.metrics:
        scores["lone_sensitivity"] = run.metrics["lone_sensitivity"]
    return {
        "method": run.label,
        "stream": stream,
        "condition": condition,
        "target": run.target,
        "stream_seed": run.stream_seed,
        "images": len(run.labels),
        "said": _counts(run),
        "seconds": round(sum(step["seconds"] or 0.0 for step in run.steps), 4),
        **{metric: None if value is None else round(value, 6) for metric, value in scores.items()},
    }


def _counts(run: Run) -> list[int]:
    return torch.bincount(run.predictions, minlength=len(run.classes)).tolist()


def _cost(run: Run) -> dict[str, Any]:
    """Measured milliseconds of a step, and its forward passes per image as they were counted."""
    arguments = run.arguments
    return {
        "method": arguments["method"],
        "ms": round(1000 * (run.seconds_per_step or 0.0), 4),
        "forwards": forwards_of(run),
        "experts": len(arguments["pool"]["experts"]),
        "batch_size": arguments["batch_size"],
        "dtype": arguments.get("dtype", "float32"),
    }


def _draws(runs: Sequence[Run], count: int) -> dict[str, dict[str, dict[str, str]]]:
    """Encoded draws by 'method|stream|condition', metric and target: of methods that answered at every target.

    They are means over stream seeds, which share a target's images; the rows have each seed's scores.
    """
    targets = {stream: {run.target for run in own} for stream, own in grouped(runs, "stream").items()}
    complete = {
        (method, stream, target): own
        for (method, stream), every in grouped(runs, "label", "stream").items()
        for target, own in grouped(every, "target").items()
        if {run.target for run in every} == targets[stream]
    }
    draws: dict[str, dict[str, dict[str, str]]] = {}
    for (method, stream, target), scores in mean_draws(complete, SCORES, min(count, MOST_DRAWS)).items():
        name, _, condition = stream.partition(", ")
        for metric, values in scores.items():
            if not np.isnan(values).any():  # a target with one class has no AUROC
                own = draws.setdefault(f"{method}|{name}|{condition}", {}).setdefault(metric, {})
                own[target] = encoded(values)
    return draws


def write_record(path: Path, groups: Iterable[Group], head: Mapping[str, Any]) -> None:
    lines = ",\n".join(json.dumps(group, separators=(",", ":")) for group in groups)
    write_text(path, json.dumps({"schema_version": SCHEMA_VERSION, **head})[:-1] + ', "groups": [\n' + lines + "\n]}\n")


def read_records(paths: Sequence[Path], *, allow_tries: bool = False) -> list[Group]:
    """The groups of several records as one list. The same rows from two different pools are refused."""
    groups: dict[tuple[Any, ...], Group] = {}
    for path in paths:
        record = read_json(path, SCHEMA_VERSION)
        if record["is_try"] and not allow_tries:
            raise InputError(f"{path} is the record of a try (few images, steps or a tiny network): it shows nothing.")
        for group in record["groups"]:
            key = group["stage"], group["pool"], group["ours"], record["later"]
            other = groups.setdefault(key, {**group, "later": record["later"], "file": path.name})
            if other["fingerprint"] != group["fingerprint"]:
                raise CheckpointError(
                    f"{other['file']} and {path.name} hold {group['stage']} of {group['pool']} from two different "
                    f"pools of that name. Delete one of the records, or mark the newer one with --later."
                )
    return list(groups.values())
