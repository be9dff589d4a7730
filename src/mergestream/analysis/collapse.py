"""Merged models that have given up a class."""

from collections.abc import Iterable
from dataclasses import dataclass

from mergestream.records import Run


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

    def in_words(self) -> str:
        return (
            f"{self.label} on {self.stream}, {self.target} (seed {self.seed}): the class '{self.class_name}' has all "
            f"but vanished: {100 * self.share:.1f} % of its answers, {100 * self.experts:.1f} % of the experts'."
        )


def collapses(runs: Iterable[Run]) -> list[Collapse]:
    """Every class that vanished in a run. A single expert is not a merged model and is not looked at."""
    found = []
    for run in runs:
        arguments = run.arguments
        for each in run.metrics.get("collapsed", []) if arguments["method"] != "single_expert" else []:
            where = arguments["label"], arguments["stream"]["name"], arguments["data"]["domain"], arguments["seed"]
            found.append(Collapse(*where, each["class"], each["share"], each["experts"]))
    return found
