"""Cost of a batch per method, from its options: forwards, backwards, models in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mergestream.bench.analysis.comparison import SINGLES
from mergestream.bench.records import Run

ONE_MODEL = "single_expert"


@dataclass(frozen=True)
class Cost:
    """Cost of one batch: passes, and models in memory with the K experts included (docs/methods.md)."""

    label: str
    experts: int
    forwards: float
    backwards: float
    models: float
    at_start: str = ""  # extra cost of the first batches, or of the merge before them


def costs(runs: Sequence[Run]) -> list[Cost]:
    """One cost per label, single experts as one; for the largest pool."""
    by_label: dict[str, Cost] = {}
    for run in runs:
        arguments = run.arguments
        label = SINGLES if arguments["method"] == ONE_MODEL else arguments["label"]
        cost = cost_of(label, arguments["method"], arguments["options"], len(arguments["pool"]["experts"]))
        if label not in by_label or cost.experts > by_label[label].experts:
            by_label[label] = cost
    single = [by_label.pop(SINGLES)] if SINGLES in by_label else []
    return [*by_label.values(), *single]


def cost_of(label: str, method: str, options: dict[str, Any], experts: int) -> Cost:
    """Cost of a step that computes its own expert logits."""
    again = 1 if options.get("recalibrate_bn") else 0
    if method in ("entropy_adaptive", "prior_adaptive"):
        scored = experts * (1 + len(options["views"])) / options["refresh_every"]
        return Cost(label, experts, scored + 1 + again, 0, experts + 1)
    if method in ("ensemble", "select_expert"):
        return Cost(label, experts, experts, 0, experts)
    if method == "adamerging":
        return Cost(label, experts, options["steps"] + 1 + again, options["steps"], experts + 3)
    if method == ONE_MODEL:
        return Cost(label, experts, 1, 0, 1)
    models, at_start = _merge_cost(method, options.get("statistics") == "target", experts)
    return Cost(label, experts, 1 + again, 0, models, at_start)


def _merge_cost(method: str, from_target: bool, experts: int) -> tuple[int, str]:
    """Models in memory while merging, and the cost before most batches, of a method that merges once."""
    if method == "fisher":
        if from_target:
            return 4 * experts + 2, "backwards of every expert on the first images"
        return 2 * experts + 4, "one merge; each site measures its Fisher information"
    if method in ("regmean", "regmean_pp"):
        passes = experts + (method == "regmean_pp")
        source = f"{passes} forwards on the first images" if from_target else "each site measures its Gram matrices"
        return experts + 1, f"one solve per layer; {source}"
    return experts + (2 if method in ("task_arithmetic", "ties") else 1), "one merge"
