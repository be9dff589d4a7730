"""Merged models that have given up a class, and classes that the experts never answer to begin with."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mergestream.bench.records import Run

# Of the labels, and of the single experts' answers: a class that is common and hardly ever said.
COMMON, HARDLY = 0.05, 0.01


@dataclass(frozen=True)
class Collapse:
    """A class that a model has all but given up at one target, though every expert predicts it."""

    label: str
    stream: str
    target: str
    seed: int
    class_name: str
    share: float
    experts: float


def collapses(runs: Iterable[Run]) -> list[Collapse]:
    """Every class that vanished in a run. A single expert is not a merged model and is not looked at."""
    found = []
    for run in runs:
        arguments = run.arguments
        for each in run.metrics.get("collapsed", []) if arguments["method"] != "single_expert" else []:
            where = arguments["label"], arguments["stream"]["name"], arguments["data"]["domain"], arguments["seed"]
            found.append(Collapse(*where, each["class"], each["share"], each["experts"]))
    return found


def collapses_in_words(found: Sequence[Collapse]) -> list[str]:
    """One sentence per method and class: at which targets, on which streams, and the worst case in numbers."""
    groups: dict[tuple[str, str], list[Collapse]] = defaultdict(list)
    for each in found:
        groups[each.label, each.class_name].append(each)
    sentences = []
    for (label, class_name), group in groups.items():
        targets, streams = (", ".join(dict.fromkeys(getattr(c, key) for c in group)) for key in ("target", "stream"))
        worst = min(group, key=lambda c: c.share / c.experts)
        sentences.append(
            f"{label}: the class '{class_name}' has all but vanished at {targets} ({streams}); at worst it is "
            f"{100 * worst.share:.1f} % of the answers at {worst.target}, {100 * worst.experts:.1f} % of the experts'."
        )
    return sentences


def unspoken_classes(runs: Sequence[Run]) -> list[str]:
    """Sentences on common classes that the experts alone hardly ever answer: no merging of theirs can be blamed."""
    single = [run for run in runs if run.arguments["method"] == "single_expert"]
    if not single:
        return []
    matrix = np.sum([run.metrics["confusion"] for run in single], axis=0)
    truth, said = (matrix.sum(axis=axis) / matrix.sum() for axis in (1, 0))
    return [
        f"The experts alone hardly ever answer '{name}': {100 * said[c]:.1f} % of their answers, "
        f"{100 * truth[c]:.1f} % of the labels. The check for vanished classes needs experts that do; read recall "
        f"per class."
        for c, name in enumerate(single[0].classes)
        if truth[c] >= COMMON and said[c] < HARDLY
    ]
