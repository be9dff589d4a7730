"""Scores of answers, as they are and under bootstrap resamples of images or slides, all at once on the device."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SCORES = ("accuracy", "balanced_accuracy", "auroc")


def resampled(labels: np.ndarray, units: np.ndarray, count: int, key: str) -> np.ndarray:
    """How often each image counts [1+R,N]: first once each, then in R draws of whole units with replacement.

    The draws depend on the `key` (data set and target) alone: methods, streams and seeds share them, so that
    differences are paired and several seeds on the same images do not narrow an interval. A draw that lacks a class
    is drawn again: its scores would be of another kind.
    """
    random = np.random.RandomState(int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big"))
    groups = int(units.max()) + 1
    has = np.zeros((groups, int(labels.max()) + 1))
    np.add.at(has, (units, labels), 1)
    present = has.sum(axis=0) > 0
    drawn: list[np.ndarray] = []
    while len(drawn) < count:
        counts = random.multinomial(groups, np.full(groups, 1 / groups), size=count)
        drawn += [row for row in counts if ((row @ has) > 0)[present].all()]
    return np.concatenate([np.ones((1, len(labels))), np.stack(drawn[:count])[:, units]])


def scores(logits: Tensor, labels: Tensor, draws: Tensor, resample: Sequence[str]) -> dict[str, Tensor]:
    """Every score under every draw [1+R]; those not in `resample` as they are alone [1]. draws: float64 [1+R,N]."""
    count = logits.shape[1]
    truth = torch.nn.functional.one_hot(labels, count).double()
    hits = truth * (logits.argmax(dim=-1) == labels)[:, None]
    functions = {
        "accuracy": lambda w: (w @ hits).sum(dim=1) / w.sum(dim=1),
        "balanced_accuracy": lambda w: torch.nanmean((w @ hits) / (w @ truth), dim=1),
        "auroc": lambda w: _macro_auroc(torch.softmax(logits.float(), dim=-1), truth, w),
    }
    return {name: functions[name](draws if name in resample else draws[:1]) for name in SCORES}


def _macro_auroc(probabilities: Tensor, truth: Tensor, draws: Tensor) -> Tensor:
    """One class against the rest, mean over the classes that occur; NaN where there is one alone."""
    present = truth.sum(dim=0).nonzero().flatten().tolist()
    if len(present) < 2:
        return torch.full((len(draws),), torch.nan, dtype=draws.dtype, device=draws.device)
    if len(present) == 2 and truth.shape[1] == 2:
        present = present[1:]  # the other one is its mirror image
    return torch.stack([_auroc(probabilities[:, c], truth[:, c], draws) for c in present]).mean(dim=0)


def _auroc(values: Tensor, positive: Tensor, draws: Tensor) -> Tensor:
    """The chance that a positive ranks above a negative, equal values counting a half, under every draw."""
    ordered, order = values.sort()
    _, sizes = ordered.unique_consecutive(return_counts=True)
    ends = sizes.cumsum(dim=0) - 1
    weights, truth = draws[:, order], positive[order]
    above = (weights * truth).cumsum(dim=1)[:, ends]
    below = (weights * (1 - truth)).cumsum(dim=1)[:, ends]
    zero = torch.zeros_like(above[:, :1])
    positives, negatives = (torch.diff(each, dim=1, prepend=zero) for each in (above, below))
    won = (positives * (below - negatives / 2)).sum(dim=1)
    return won / (above[:, -1] * below[:, -1])
