"""What a batch costs each method, from its options: forwards, backwards, models held in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mergestream.bench.analysis.comparison import SINGLES
from mergestream.bench.records import Run

ONE_MODEL = "single_expert"


@dataclass(frozen=True)
class Cost:
    """Of one batch: forward and backward passes, and models in memory, the K experts among them (docs/methods.md)."""

    label: str
    experts: int
    forwards: float
    backwards: float
    models: float
    at_start: str = ""  # what the first batches, or the merge before them, cost on top

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def costs(runs: Sequence[Run]) -> list[Cost]:
    """One per label, single experts as one; the largest pool counts."""
    found: dict[str, Cost] = {}
    for run in runs:
        arguments = run.arguments
        label = SINGLES if arguments["method"] == ONE_MODEL else arguments["label"]
        cost = cost_of(label, arguments["method"], arguments["options"], len(arguments["pool"]["experts"]))
        if label not in found or cost.experts > found[label].experts:
            found[label] = cost
    single = [found.pop(SINGLES)] if SINGLES in found else []
    return [*found.values(), *single]


def cost_of(label: str, method: str, options: dict[str, Any], experts: int) -> Cost:
    """The step's arithmetic, expert logits not given."""
    again = 1 if options.get("recalibrate_bn") else 0
    if method == "entropy_adaptive":
        scored = experts * (1 + len(options["views"])) / options["refresh_every"]
        return Cost(label, experts, scored + 1 + again, 0, experts + 1)
    if method in ("ensemble", "select_expert"):
        return Cost(label, experts, experts, 0, experts)
    if method == "adamerging":
        return Cost(label, experts, options["steps"] + 1 + again, options["steps"], experts + 3)
    if method == ONE_MODEL:
        return Cost(label, experts, 1, 0, 1)
    held, at_start = _merged_once(method, options.get("statistics") == "target", experts)
    return Cost(label, experts, 1 + again, 0, held, at_start)


def _merged_once(method: str, from_target: bool, experts: int) -> tuple[int, str]:
    """Models held while merging, and what is spent before most batches: such a method then answers with one model."""
    if method == "fisher":
        if from_target:
            return 4 * experts + 2, "backwards of every expert on the first images"
        return 2 * experts + 4, "one merge; each site measures its Fisher information"
    if method in ("regmean", "regmean_pp"):
        passes = experts + (method == "regmean_pp")
        told = f"{passes} forwards on the first images" if from_target else "each site measures its Gram matrices"
        return experts + 1, f"one solve a layer; {told}"
    return experts + (2 if method in ("task_arithmetic", "ties") else 1), "one merge"
