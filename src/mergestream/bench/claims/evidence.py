"""Each expert's scores on each batch, beside its error there."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mergestream.bench.analysis.comparison import pairing_of
from mergestream.bench.records import Run
from mergestream.functional import scores as scoring


@dataclass(frozen=True)
class Evidence:
    """Scores and errors of K experts on T batches of one stream [T,K]; a lower score means more confident."""

    target: str
    stream: str
    experts: tuple[str, ...]
    entropy: np.ndarray  # nats
    max_softmax: np.ndarray  # 1 minus the mean of the maximum softmax
    error: np.ndarray  # 0 to 1


def evidence_of_runs(runs: Sequence[Run]) -> list[Evidence]:
    """Evidence from the labelled runs of every expert alone: one per target, seed, pool and stream."""
    groups: dict[tuple[Any, ...], dict[str, Run]] = defaultdict(dict)
    for run in runs:
        if run.arguments["method"] == "single_expert":
            key = *pairing_of(run), run.arguments["stream"]["name"], run.arguments["stream"]["hash"]
            groups[key][run.arguments["options"]["expert"]] = run
    return [_of_group(group) for group in groups.values() if len(group) > 1]


def _of_group(group: dict[str, Run]) -> Evidence:
    first = next(iter(group.values()))
    arguments = first.arguments
    experts = tuple(name for name in arguments["pool"]["experts"] if name in group)
    # Softmax undoes the logarithm; a probability that fp16 rounded to 0 stays 0.
    logits = torch.stack([group[name].probabilities.log() for name in experts])  # [K,N,C]
    wrong = (logits.argmax(dim=-1) != first.labels).float()
    sizes = [len(batch) for batch in first.batches]

    def per_batch(values: Any) -> np.ndarray:
        return torch.stack(list(values)).numpy().astype(float)

    parts = logits.split(sizes, dim=1)
    return Evidence(
        arguments["data"]["domain"],
        arguments["stream"]["name"],
        experts,
        per_batch(map(scoring.entropy, parts)),
        per_batch(map(scoring.max_softmax, parts)),
        per_batch(part.mean(dim=1) for part in wrong.split(sizes, dim=1)),
    )
