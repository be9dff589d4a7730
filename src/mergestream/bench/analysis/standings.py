"""Methods ranked against each other."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mergestream.bench.analysis.comparison import cell_of
from mergestream.bench.records import Run


@dataclass(frozen=True)
class Standing:
    """A method among all others on one stream: its mean rank over (target, seed, pool), 1 for the best, and how often
    it was above and below another one.
    """

    label: str
    stream: str
    mean_rank: float
    wins: int
    losses: int


def standings(runs: Sequence[Run], metric: str = "accuracy") -> list[Standing]:
    """Equal values share their ranks. Cells that lack one of the methods are left out, so that ranks compare."""
    found = []
    for stream in dict.fromkeys(run.arguments["stream"]["name"] for run in runs):
        here = [run for run in runs if run.arguments["stream"]["name"] == stream]
        labels = list(dict.fromkeys(run.arguments["label"] for run in here))
        table: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
        for run in here:
            table[cell_of(run)][run.arguments["label"]] = run.metrics[metric]
        values = np.array([[row[label] for label in labels] for row in table.values() if len(row) == len(labels)])
        if not len(values):
            continue
        above = (values[:, :, None] > values[:, None, :]).sum(axis=2)  # [cells, methods]: how many it beats
        below = (values[:, :, None] < values[:, None, :]).sum(axis=2)
        ranks = 1 + below + (len(labels) - 1 - above - below) / 2
        for m, label in enumerate(labels):
            found.append(
                Standing(label, stream, float(ranks[:, m].mean()), int(above[:, m].sum()), int(below[:, m].sum()))
            )
    return found
