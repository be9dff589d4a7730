"""Ranks of the methods against each other."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mergestream.bench.analysis.comparison import Pairing, pairing_of, streams_of
from mergestream.bench.records import Run


@dataclass(frozen=True)
class Standing:
    """A method's mean rank on one stream over (target, seed, pool), 1 for the best, with its wins and losses."""

    label: str
    stream: str
    mean_rank: float
    wins: int
    losses: int


def rank_methods(runs: Sequence[Run], metric: str = "accuracy") -> list[Standing]:
    """Rank the methods; equal values share a rank. Cells without all methods are left out, so that ranks compare."""
    standings: list[Standing] = []
    for stream in streams_of(runs):
        here = [run for run in runs if run.arguments["stream"]["name"] == stream]
        labels = list(dict.fromkeys(run.arguments["label"] for run in here))
        table: dict[Pairing, dict[str, float]] = defaultdict(dict)
        for run in here:
            table[pairing_of(run)][run.arguments["label"]] = run.metrics[metric]
        values = np.array([[row[label] for label in labels] for row in table.values() if len(row) == len(labels)])
        if not len(values):
            continue
        above = (values[:, :, None] > values[:, None, :]).sum(axis=2)  # [cells, methods]: how many it beats
        below = (values[:, :, None] < values[:, None, :]).sum(axis=2)
        ranks = 1 + below + (len(labels) - 1 - above - below) / 2
        for m, label in enumerate(labels):
            standings.append(
                Standing(label, stream, float(ranks[:, m].mean()), int(above[:, m].sum()), int(below[:, m].sum()))
            )
    return standings
