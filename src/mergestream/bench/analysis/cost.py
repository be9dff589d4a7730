"""Cost of a step per method: forwards and backwards as they were counted, and models in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mergestream.bench.analysis.comparison import SINGLES
from mergestream.bench.records import Run

ONE_MODEL = "single_expert"
NOT_COUNTED = "not counted"


@dataclass(frozen=True)
class Cost:
    """Passes per image, and models in memory with the K experts included (docs/methods.md)."""

    label: str
    experts: int
    forwards: float | None  # of experts and merged models; None in a run that was recorded before they were counted
    backwards: float | None
    models: float
    at_start: str = ""  # what is done once, before most batches


def costs(runs: Sequence[Run]) -> list[Cost]:
    """One cost per label, single experts as one; for the largest pool."""
    by_label: dict[str, Cost] = {}
    for run in runs:
        arguments = run.arguments
        label = SINGLES if arguments["method"] == ONE_MODEL else arguments["label"]
        experts = len(arguments["pool"]["experts"])
        if label not in by_label or experts > by_label[label].experts:
            held = _models_held(arguments["method"], arguments["options"], experts)
            by_label[label] = Cost(label, experts, forwards_of(run), per_image(run, "backwards"), *held)
    single = [by_label.pop(SINGLES)] if SINGLES in by_label else []
    return [*by_label.values(), *single]


def forwards_of(run: Run) -> float | None:
    """Forward passes per image of a run, through experts and merged models; None where they were not counted."""
    expert, merged = per_image(run, "expert_forwards"), per_image(run, "merged_forwards")
    return None if expert is None or merged is None else expert + merged


def per_image(run: Run, passes: str) -> float | None:
    """The mean over a run's images of what its steps counted; None where a step did not."""
    counted = [(step.get(passes), step["images"]) for step in run.steps]
    if any(each is None for each, _ in counted):
        return None
    return float(sum(each * images for each, images in counted) / sum(images for _, images in counted))


def shown(passes: float | None) -> str:
    return NOT_COUNTED if passes is None else f"{passes:.4g}"


def _models_held(method: str, options: dict[str, Any], experts: int) -> tuple[int, str]:
    """Models in memory while a method merges or answers, and what it does once."""
    from_target = options.get("statistics") == "target"
    if method == "fisher":
        if from_target:
            return 4 * experts + 2, "Fisher information of every expert on the first images"
        return 2 * experts + 4, "one merge; each site measures its Fisher information"
    if method in ("regmean", "regmean_pp"):
        source = "the experts on the first images" if from_target else "each site measures its Gram matrices"
        return experts + 1, f"one solve per layer; {source}"
    always = {"entropy_adaptive": 1, "prior_adaptive": 1, "ensemble": 0, "select_expert": 0, "adamerging": 3}
    if method == ONE_MODEL:
        return 1, ""
    if method in always:
        return experts + always[method], ""
    return experts + (2 if method in ("task_arithmetic", "ties") else 1), "one merge"
