"""The record of a study: small groups of rows with encoded bootstrap draws, one group per stage and pool."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mergestream.bench.analysis.cost import cost_of
from mergestream.bench.analysis.group_intervals import Draws, scores_under_draws
from mergestream.bench.records import Run
from mergestream.bench.study.results_plan import ABLATION, METRICS, OURS, PoolRecipe, Stage
from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.files import read_json, write_text

SCHEMA_VERSION = 1
LEVELS = 65535  # scores from 0 to 1 are stored as 16-bit numbers: finer than a hundredth of a point
SINGLE = "single_expert"
Group = dict[str, Any]


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
    names: Mapping[str, str],
    left_out: Mapping[str, str],
    resamples: int,
) -> Group:
    """All runs of one pool at one stage: rows, and every method's draws as the mean over its targets.

    `names`: what rows call a label, where that is not the label itself.
    """
    shown = [run for run in runs if stage.kind in ("main", "costs") or run.arguments["method"] != SINGLE]
    rows = [_row(run, names) for run in shown]
    more: dict[str, Any] = {"specs": ABLATION} if stage.kind == "ablation" else {}
    if stage.kind == "hostile":
        for row, run in zip(rows, shown, strict=True):
            row["agrees_with_loud"] = _agreement_with_first_expert(run, runs)
        more = {"loud": runs[0].arguments["pool"]["experts"][0]}
    if stage.kind == "costs":
        rows = []
        more = {"costs": list({run.arguments["method"]: _cost(run) for run in reversed(shown)}.values())[::-1]}
    return {
        "stage": stage.name,
        "kind": stage.kind,
        "pool": pool.name,
        **asdict(pool),
        "fingerprint": fingerprint,
        "ours": OURS,
        "seconds": round(sum(row["seconds"] for row in rows), 2),
        "classes": list(runs[0].classes),
        "experts": _expert_answers(runs),
        "left_out": dict(left_out),
        "rows": rows,
        "resamples": _draws(shown, names, resamples) if stage.kind in ("main", "streams", "ablation") else {},
        **more,
    }


def _row(run: Run, names: Mapping[str, str]) -> dict[str, Any]:
    stream, _, condition = run.arguments["stream"]["name"].partition(", ")
    scores = {metric: run.metrics[metric] for metric in ("accuracy", "balanced_accuracy", "auroc")}
    return {
        "method": _method(run, names),
        "stream": stream,
        "condition": condition,
        "target": run.arguments["data"]["domain"],
        "images": len(run.labels),
        "said": _counts(run),
        "seconds": round(sum(step["seconds"] or 0.0 for step in run.steps), 4),
        **{metric: None if value is None else round(value, 6) for metric, value in scores.items()},
    }


def _method(run: Run, names: Mapping[str, str]) -> str:
    label = str(run.arguments["label"])
    return names.get(label, label)


def _counts(run: Run) -> list[int]:
    return torch.bincount(run.predictions, minlength=len(run.classes)).tolist()


def _expert_answers(runs: Sequence[Run]) -> dict[str, dict[str, list[int]]]:
    """How often each expert alone predicts each class, by target."""
    answers: dict[str, dict[str, list[int]]] = {}
    for run in runs:
        if run.arguments["method"] == SINGLE:
            own = answers.setdefault(run.arguments["data"]["domain"], {})
            own[run.arguments["options"]["expert"]] = _counts(run)
    return answers


def _agreement_with_first_expert(run: Run, runs: Sequence[Run]) -> float:
    """The share of a run's answers that the first expert alone gives too, on the same stream."""
    first, place = (
        run.arguments["pool"]["experts"][0],
        (run.arguments["data"]["domain"], run.arguments["stream"]["hash"]),
    )
    alone = next(
        each
        for each in runs
        if each.arguments["options"].get("expert") == first
        and (each.arguments["data"]["domain"], each.arguments["stream"]["hash"]) == place
    )
    return round(float((run.predictions == alone.predictions).double().mean()), 6)


def _cost(run: Run) -> dict[str, Any]:
    """Measured milliseconds of a step, and the forward passes per image that its arithmetic takes."""
    arguments = run.arguments
    cost = cost_of(arguments["label"], arguments["method"], arguments["options"], len(arguments["pool"]["experts"]))
    return {
        "method": arguments["method"],
        "ms": round(1000 * (run.seconds_per_step or 0.0), 4),
        "forwards": cost.forwards,
        "experts": len(arguments["pool"]["experts"]),
        "batch_size": arguments["batch_size"],
        "dtype": arguments.get("dtype", "float32"),
    }


def _draws(runs: Sequence[Run], names: Mapping[str, str], count: int) -> dict[str, dict[str, str]]:
    """Encoded draws by 'method|stream|condition': of methods that answered at every target of their stream."""
    by_key: dict[tuple[str, str], list[Run]] = {}
    targets: dict[str, set[str]] = {}
    for run in runs:
        stream, target = run.arguments["stream"]["name"], run.arguments["data"]["domain"]
        by_key.setdefault((_method(run, names), stream), []).append(run)
        targets.setdefault(stream, set()).add(target)
    draws: Draws = {}
    encoded_draws = {}
    for (method, stream), own in by_key.items():
        if len(own) == len(targets[stream]):
            metrics = METRICS[own[0].arguments["data"]["dataset"]]
            scores = [scores_under_draws(run, metrics, draws, count) for run in own]
            means = {metric: np.mean([each[metric] for each in scores], axis=0) for metric in scores[0]}
            encoded_draws[f"{method}|{stream}|"] = {metric: encoded(mean) for metric, mean in means.items()}
    return encoded_draws


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
            # A pool may be trained again in another session: both trainings are listed.
            own = group["fingerprint"] if group["kind"] == "train" else group["ours"]
            key = group["stage"], group["pool"], own, record["later"]
            other = groups.setdefault(key, {**group, "later": record["later"], "file": path.name})
            if other["fingerprint"] != group["fingerprint"]:
                raise CheckpointError(
                    f"{other['file']} and {path.name} hold {group['stage']} of {group['pool']} from two different "
                    f"pools of that name. Delete one of the records, or mark the newer one with --later."
                )
    return list(groups.values())
