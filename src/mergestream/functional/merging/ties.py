"""TIES (Yadav et al. 2023): trim each task vector, elect a sign per weight, average those that agree."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergestream.functional.merging.weighted_sums import Rows, Span, chunks_of

DISJOINT_MERGES = ("mean", "sum", "max")
# Weights per chunk: few enough for the caches, many enough for several threads.
CHUNK = 1 << 19
# Sample size to guess the threshold: one magnitude in 256, within these bounds.
SAMPLE = (1 << 12, 1 << 18)


@dataclass(frozen=True)
class Part:
    """Weights that are trimmed together: spans of the flat vector, and how many of them are not padding."""

    spans: tuple[Span, ...]
    numbers: int


def ties(
    base: Tensor, rows: Rows, parts: Sequence[Part], *, keep: float, merge: str, scale: float, out: Tensor
) -> Tensor:
    """Write theta_0 + scale * tau into out [P]; tau is the disjoint merge of the trimmed task vectors. base [P].

    keep: the share of each task vector that survives, by magnitude within a part. Needs memory for chunks only.
    """
    balance, cancelled = 0, []
    for part in parts:
        limits = [_threshold(base, rows, k, part, keep) for k in range(len(rows))]
        for span in chunks_of(part.spans, CHUNK):
            task = _trimmed(base, rows, span, limits)
            total = _total(task)
            sign = total.sign()
            balance += int(sign.sum())
            if bool(((task.amax(dim=0) > 0) & (total == 0)).any()):
                cancelled.append((span, limits))
            _write(base, span, task, sign, merge, scale, out)
    # Weights whose trimmed task vectors cancel exactly follow the majority of all elected signs. As published, no
    # majority counts as negative; only the maximum is multiplied by the sign itself, here 0.
    majority = (balance > 0) - (balance < 0) or (0 if merge == "max" else -1)
    for span, limits in cancelled:
        task = _trimmed(base, rows, span, limits)
        sign = _total(task).sign()
        _write(base, span, task, torch.where(sign == 0, float(majority), sign), merge, scale, out)
    return out


def _threshold(base: Tensor, rows: Rows, k: int, part: Part, keep: float) -> float:
    """The smallest magnitude that expert k keeps: the (P - int(keep P))-th smallest; 0 if nothing is trimmed."""
    trimmed = part.numbers - int(keep * part.numbers)
    if keep >= 1 or trimmed == 0:
        return 0.0
    padded = sum(stop - start for start, stop in part.spans)

    def magnitudes(span: Span, step: int = 1) -> Tensor:
        start, stop = span
        return torch.sub(rows.span(start, stop)[k, ::step], _wide(base[start:stop:step])).abs_()

    sampled = min(max(padded // 256, SAMPLE[0]), SAMPLE[1])
    sample = torch.cat([magnitudes(span, max(1, padded // sampled)) for span in part.spans])
    # Padding has a task vector of 0, so it comes first and shifts every rank by its length.
    rank = trimmed + padded - part.numbers
    return kth_smallest(lambda: map(magnitudes, chunks_of(part.spans, CHUNK)), sample, padded, rank)


def _trimmed(base: Tensor, rows: Rows, span: Span, limits: Sequence[float]) -> Tensor:
    """Task vectors [K,n] with everything below each expert's limit set to 0."""
    task = torch.sub(rows.span(*span), _wide(base[span[0] : span[1]]))
    for own, limit in zip(task, limits, strict=True):
        if limit > 0:
            # hardshrink keeps values strictly above its bound, so the bound is the next number below the limit.
            torch.hardshrink(own, _next_below(limit, task.dtype), out=own)
    return task


def _total(task: Tensor) -> Tensor:
    """Sum over experts in their order; a reduction is slower over so few rows."""
    total = task[0].clone()
    for own in task[1:]:
        total.add_(own)
    return total


def _write(base: Tensor, span: Span, task: Tensor, sign: Tensor, merge: str, scale: float, out: Tensor) -> None:
    """Merge the entries of task [K,n] that agree with the sign [n], and add them to the base. Overwrites task."""
    agreeing = task.mul_(sign).clamp_min_(0)
    if merge == "max":
        merged = agreeing.amax(dim=0)
    else:
        count = _total(agreeing.sign()).clamp_min_(1) if merge == "mean" else None
        merged = _total(agreeing)
        merged = merged if count is None else merged.div_(count)
    start, stop = span
    out[start:stop].copy_(torch.add(_wide(base[start:stop]), merged.mul_(sign), alpha=scale))


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _next_below(limit: float, dtype: torch.dtype) -> float:
    return float(torch.nextafter(torch.tensor(limit, dtype=dtype), torch.tensor(0.0, dtype=dtype)))


# Half the width of the first bracket, in standard deviations of the rank of a sampled quantile.
WIDTH = 6

Chunks = Callable[[], Iterator[Tensor]]


def kth_smallest(chunks: Chunks, sample: Tensor, count: int, k: int) -> float:
    """The k-th smallest (from 1) of the `count` numbers >= 0 that each call of `chunks` yields.

    A sample brackets the answer; one pass counts the numbers below the bracket and copies the few inside it. Only after
    a bad sample are all numbers in memory at once.
    """
    if not 1 <= k <= count:
        raise ValueError(f"k must lie between 1 and {count}, got {k}")
    ordered = sample.sort().values
    rank, margin = (k - 0.5) / count * len(ordered), WIDTH * (len(ordered) / 4) ** 0.5 + 1
    low, high = ordered[max(int(rank - margin), 0)], ordered[min(int(rank + margin), len(ordered) - 1)]
    below, inside = 0, []
    for chunk in chunks():
        below += int(torch.count_nonzero(chunk < low))
        inside.append(chunk[(chunk >= low) & (chunk <= high)])
    bracket = torch.cat(inside)
    if not below < k <= below + len(bracket):
        below, bracket = 0, torch.cat(list(chunks()))
    return float(bracket.kthvalue(k - below).values)
