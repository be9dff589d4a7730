"""Scores under bootstrap draws of whole units, such as slides or patients: accuracy, balanced accuracy and AUROC."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

RESAMPLES = 500
ATTEMPTS = 100  # rounds of draws, before too many of them lack a class


def unit_draws(labels: np.ndarray, units: np.ndarray, key: str, count: int = RESAMPLES) -> np.ndarray:
    """How often each image counts in `count` draws of whole units with replacement [count,N].

    The draws depend on labels [N], units [N] (numbers from 0) and the `key` (data set and target) alone: methods,
    streams and seeds share them, so that differences are paired and several seeds on the same images do not narrow an
    interval. A draw that lacks a class is drawn again: its scores would be of another kind.
    """
    random = np.random.RandomState(int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big"))
    total = int(units.max()) + 1
    members = np.zeros((total, int(labels.max()) + 1))
    np.add.at(members, (units, labels), 1)
    present = members.sum(axis=0) > 0
    accepted: list[np.ndarray] = []
    for _ in range(ATTEMPTS):
        draws = random.multinomial(total, np.full(total, 1 / total), size=count)
        accepted += [draw for draw in draws if ((draw @ members) > 0)[present].all()]
        if len(accepted) >= count:
            return np.stack(accepted[:count])[:, units]
    raise ValueError(f"Too few of {total} units hold each class: most draws lack one.")


def drawn_scores(
    probabilities: Tensor, predictions: Tensor, labels: Tensor, draws: Tensor, metrics: Sequence[str]
) -> dict[str, Tensor]:
    """Every metric under every draw [R]. probabilities: [N,C], predictions and labels: [N], draws: float64 [R,N]."""
    truth = torch.nn.functional.one_hot(labels, probabilities.shape[1]).double()
    hits = truth * (predictions == labels)[:, None]
    functions: dict[str, Callable[[], Tensor]] = {
        "accuracy": lambda: (draws @ hits).sum(dim=1) / draws.sum(dim=1),
        "balanced_accuracy": lambda: torch.nanmean((draws @ hits) / (draws @ truth), dim=1),
        "auroc": lambda: _macro_auroc(_ranked(probabilities), truth, draws),
    }
    return {metric: functions[metric]() for metric in metrics}


def _ranked(probabilities: Tensor) -> Tensor:
    """Values in the order of the probabilities, also near 1, where half precision rounds: the others' sum has it."""
    own = probabilities.double()
    others = (own.sum(dim=1, keepdim=True) - own).clamp_min(1e-12)
    # Rounded, so that probabilities that are equal stay so whatever the order of the sum.
    return torch.where(own <= 0.5, own, 1 - others.log().mul(1e5).round())


def _macro_auroc(values: Tensor, truth: Tensor, draws: Tensor) -> Tensor:
    """One class against the rest, mean over the classes that occur; NaN where there is only one."""
    present = truth.sum(dim=0).nonzero().flatten().tolist()
    if len(present) < 2:
        return torch.full((len(draws),), torch.nan, dtype=draws.dtype)
    if truth.shape[1] == 2:
        present = present[1:]  # the other class is its mirror image
    return torch.stack([_auroc(values[:, c], truth[:, c], draws) for c in present]).mean(dim=0)


def _auroc(values: Tensor, positive: Tensor, draws: Tensor) -> Tensor:
    """The chance that a positive ranks above a negative, equal values counting a half, under every draw [R]."""
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
