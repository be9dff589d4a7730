"""Classes that merged models no longer predict, and classes that the experts hardly ever predict themselves."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mergestream.bench.records import Run

# A class is common from this share of the labels, and rarely predicted below this share of the experts' answers.
COMMON, RARE = 0.05, 0.01


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
