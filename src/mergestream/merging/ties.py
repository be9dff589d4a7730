"""TIES (Yadav et al. 2023): trim each task vector, elect a sign for every number, average those that agree with it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergestream.merging.ranks import kth_smallest
from mergestream.merging.rows import Rows

DISJOINT_MERGES = ("mean", "sum", "max")
# [K, CHUNK] in fp32 and its few temporaries stay in a core's cache.
CHUNK = 1 << 16


@dataclass(frozen=True)
class Part:
    """Numbers that are trimmed together: spans of the flat weights, and how many of them are not padding."""

    spans: tuple[tuple[int, int], ...]
    numbers: int


def ties(
    base: Tensor, rows: Rows, parts: Sequence[Part], *, keep: float, merge: str, scale: float, out: Tensor
) -> Tensor:
    """theta_0 + scale * tau, tau being the disjoint merge of the trimmed task vectors. base [P], out [P].

    keep: the share of each task vector that survives, by magnitude within a part. Memory beyond the bank: chunks only.
    """
    limits = [_thresholds(base, rows, part, keep) for part in parts]
    # A number whose trimmed task vectors cancel exactly follows the majority of all elected signs, which is known only
    # after a first pass. Almost always there is no such number, or the majority is the one assumed.
    balance, cancelled = _pass(base, rows, parts, limits, merge, scale, 1, out)
    if cancelled and balance <= 0:
        _pass(base, rows, parts, limits, merge, scale, -1 if balance else 0, out)
    return out


def _thresholds(base: Tensor, rows: Rows, part: Part, keep: float) -> list[float]:
    """The smallest magnitude that each expert keeps: the (P - int(keep P))-th smallest, 0 where nothing is trimmed."""
    trimmed = part.numbers - int(keep * part.numbers)
    if keep >= 1 or trimmed == 0:
        return [0.0] * len(rows)
    padded = sum(stop - start for start, stop in part.spans)

    def magnitudes(k: int) -> Iterator[Tensor]:
        for start, stop in _chunks(part.spans, len(rows) * CHUNK):
            yield (rows.span(start, stop)[k].float() - base[start:stop].float()).abs_()

    # Padding has a task vector of 0, so it comes first and moves every rank by its length.
    rank = trimmed + padded - part.numbers
    return [kth_smallest(lambda k=k: magnitudes(k), padded, rank) for k in range(len(rows))]  # type: ignore[misc]


def _pass(
    base: Tensor,
    rows: Rows,
    parts: Sequence[Part],
    limits: Sequence[Sequence[float]],
    merge: str,
    scale: float,
    undecided: int,
    out: Tensor,
) -> tuple[int, int]:
    """Write the merged weights; return the sum of all elected signs and how many numbers cancelled exactly."""
    balance = cancelled = 0
    for part, limit in zip(parts, limits, strict=True):
        bound = torch.tensor(limit, device=base.device)[:, None]
        for start, stop in _chunks(part.spans, CHUNK):
            start_weights = base[start:stop].float()
            task = rows.span(start, stop).float() - start_weights
            task.masked_fill_(task.abs() < bound, 0)
            total = task.sum(dim=0)
            zero = total == 0
            balance += int(total.sign().sum())
            cancelled += int(torch.count_nonzero(zero & (task != 0).any(dim=0))) if bool(zero.any()) else 0
            upwards = (total > 0) | zero if undecided > 0 else total > 0
            task = torch.where(upwards, task.clamp_min(0), task.clamp_max(0))
            merged = _disjoint(task, merge)
            if undecided == 0 and merge == "max":
                merged.masked_fill_(zero, 0)  # as published: the maximum is multiplied by the sign, here 0
            out[start:stop].copy_(torch.add(start_weights, merged, alpha=scale))
    return balance, cancelled


def _disjoint(task: Tensor, merge: str) -> Tensor:
    """task [K,n], each number's entries of one sign or 0 -> [n]."""
    if merge == "max":
        return task.gather(0, task.abs().argmax(dim=0, keepdim=True)).squeeze(0)
    total = task.sum(dim=0)
    return total if merge == "sum" else total.div_((task != 0).sum(dim=0).clamp_min_(1))


def _chunks(spans: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    for start, stop in spans:
        for at in range(start, stop, size):
            yield at, min(at + size, stop)
