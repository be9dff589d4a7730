"""Cost of a step per method: forwards and backwards as they were counted, and models in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from mergestream.bench.analysis.comparison import SINGLES, grouped
from mergestream.bench.records import Run


@dataclass(frozen=True)
class Cost:
    """Passes per image, and models in memory with the K experts included (docs/methods.md)."""

    label: str
    forwards: float  # of experts and merged models
    backwards: float
    models: float
    at_start: str = ""  # what is done once, before most batches


def costs(runs: Sequence[Run]) -> list[Cost]:
    """One cost per label, single experts as one; for the largest pool."""
    merged, single = ([run for run in runs if run.is_single is alone] for alone in (False, True))
    groups = grouped(merged, "label") | ({SINGLES: single} if single else {})
    largest = {label: max(own, key=lambda run: len(run.arguments["pool"]["experts"])) for label, own in groups.items()}
    return [
        Cost(label, forwards_of(run), per_image(run, "backwards"), *_models_held(run)) for label, run in largest.items()
    ]


def forwards_of(run: Run) -> float:
    """Forward passes per image of a run, through experts and merged models."""
    return per_image(run, "expert_forwards") + per_image(run, "merged_forwards")


def per_image(run: Run, passes: str) -> float:
    """The mean over a run's images of what its steps counted."""
    counted = [(step[passes], step["images"]) for step in run.steps]
    return float(sum(each * images for each, images in counted) / sum(images for _, images in counted))


def shown(passes: float) -> str:
    return f"{passes:.4g}"


def _models_held(run: Run) -> tuple[int, str]:
    """Models in memory while a method merges or answers, and what it does once."""
    described, experts = run.arguments, len(run.arguments["pool"]["experts"])
    features = False
    while "wrapped" in described:
        features, described = features or described["method"] in ("lame", "t3a"), described["wrapped"]
    if "plugin" in described:
        return experts + 1, "memory is not measured: one merged model is assumed"
    options = described["options"]
    method = described["method"]
    from_target = options.get("statistics") == "target"
    if method == "fisher":
        if from_target:
            return 4 * experts + 2, "Fisher information of every expert on the first images"
        return 2 * experts + 4, "one merge; each site measures its Fisher information"
    if method in ("regmean", "regmean_pp"):
        source = "the experts on the first images" if from_target else "each site measures its Gram matrices"
        return experts + 1, f"one solve per layer; {source}"
    always = {
        **dict.fromkeys(("ensemble", "select_expert", "image_weights"), 0),
        **dict.fromkeys(("entropy_adaptive", "merge_and_fit", "dawin", "t3_js"), 1),
        **dict.fromkeys(("tent", "sar"), 2),
        "adamerging": 3,
    }
    if run.is_single:
        return 1, ""
    if method == "merge_once":
        return experts + 1, "one merge; the experts answer the first images"
    if method in always:
        return experts + max(always[method], features), ""  # features are of the mean where no merged model answers
    return experts + (2 if method in ("task_arithmetic", "ties") else 1), "one merge"
