"""Each expert's scores on each batch, beside its error there."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.bench.analysis.comparison import pairing_of
from mergestream.bench.records import Run
from mergestream.functional import scores as scoring
from mergestream.runtime.errors import InputError


@dataclass(frozen=True)
class Evidence:
    """Scores and errors of K experts on T batches of one stream [T,K]; a lower score means more confident."""

    target: str
    stream: str
    experts: tuple[str, ...]
    entropy: np.ndarray  # nats
    max_softmax: np.ndarray  # 1 less the mean of the maximum softmax
    error: np.ndarray  # 0 to 1


def evidence_of(
    logits: Tensor, labels: Tensor, batches: Sequence[np.ndarray], *, target: str, stream: str, experts: Sequence[str]
) -> Evidence:
    """From the experts' logits [K,N,C], labels [N] and the stream's indices into them."""
    if logits.ndim != 3 or logits.shape[:2] != (len(experts), len(labels)):
        raise InputError(
            f"Expected logits [K,N,C] of {len(experts)} experts and {len(labels)} labels, got {tuple(logits.shape)}."
        )
    if not len(batches) or bool((labels < 0).any()):
        raise InputError("Evidence needs batches, and a label of 0 or more for every image.")
    wrong = (logits.argmax(dim=-1) != labels).float()
    places = [torch.as_tensor(batch) for batch in batches]

    def per_batch(score: Any) -> np.ndarray:
        return torch.stack([score(logits[:, place]) for place in places]).numpy().astype(float)

    error = torch.stack([wrong[:, place].mean(dim=1) for place in places]).numpy().astype(float)
    scores = per_batch(scoring.entropy), per_batch(scoring.max_softmax)
    return Evidence(target, stream, tuple(experts), *scores, error)


def evidence_of_runs(runs: Sequence[Run]) -> list[Evidence]:
    """From the runs of every expert alone, which a benchmark always has: one per target, seed, pool and stream."""
    groups: dict[tuple[Any, ...], dict[str, Run]] = defaultdict(dict)
    for run in runs:
        if run.arguments["method"] == "single_expert" and bool((run.labels >= 0).all()):
            key = *pairing_of(run), run.arguments["stream"]["name"], run.arguments["stream"]["hash"]
            groups[key][run.arguments["options"]["expert"]] = run
    return [_of_group(group) for group in groups.values() if len(group) > 1]


def _of_group(group: dict[str, Run]) -> Evidence:
    first = next(iter(group.values()))
    arguments = first.arguments
    experts = [name for name in arguments["pool"]["experts"] if name in group]
    # Softmax undoes the logarithm; a probability that fp16 rounded to 0 stays 0.
    logits = torch.stack([group[name].probabilities.log() for name in experts])
    sizes = [len(batch) for batch in first.batches]
    batches = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    where = {"target": arguments["data"]["domain"], "stream": arguments["stream"]["name"]}
    return evidence_of(logits, first.labels, batches, **where, experts=experts)
