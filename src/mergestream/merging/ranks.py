"""The k-th smallest number of a vector too long to copy or sort: exact, in a few passes over chunks."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# How many numbers are looked at first, to guess between which two the answer lies.
SAMPLE = 1 << 18
# Half the width of that guess, in standard deviations of the rank of a sampled quantile.
WIDTH = 6
# At most this many numbers are copied out and sorted.
COPIED = 1 << 22

Chunks = Callable[[], Iterator[Tensor]]


def kth_smallest(chunks: Chunks, count: int, k: int, *, sample: int = SAMPLE, copied: int = COPIED) -> float:
    """The k-th smallest (from 1) of the `count` numbers that `chunks` yields, as often as it is called.

    A regular sample brackets the answer, one pass counts what lies below the bracket, and the few numbers inside it
    are sorted. A sample that misleads (sorted data, few distinct values) only costs another pass.
    """
    if not 1 <= k <= count:
        raise ValueError(f"k must lie between 1 and {count}, got {k}")
    ordered = _sample(chunks, count, sample)
    rank = (k - 0.5) / count * len(ordered)
    margin = WIDTH * (len(ordered) * 0.25) ** 0.5 + 1
    low = float(ordered[max(int(rank - margin), 0)])
    high = float(ordered[min(int(rank + margin), len(ordered) - 1)])
    while True:
        below, at_low, inside, at_high = _count(chunks, low, high)
        if k <= below:
            low, high = -torch.inf, low
        elif k <= below + at_low:
            return low
        elif k > below + at_low + inside + at_high:
            low, high = high, torch.inf
        elif k > below + at_low + inside:
            return high
        elif inside <= copied:
            between = torch.cat([chunk[(chunk > low) & (chunk < high)] for chunk in chunks()])
            return float(between.kthvalue(k - below - at_low).values)
        else:
            low, high = _narrower(chunks, low, high, (k - below - at_low) / inside, inside, sample)


def _sample(chunks: Chunks, count: int, size: int) -> Tensor:
    step = max(1, count // size)
    return torch.cat([chunk[::step] for chunk in chunks()]).sort().values


def _count(chunks: Chunks, low: float, high: float) -> tuple[int, int, int, int]:
    """How many numbers are below low, equal to it, strictly between, and equal to high (0 if high is low)."""
    below = up_to_low = below_high = up_to_high = 0
    for chunk in chunks():
        below += int(torch.count_nonzero(chunk < low))
        up_to_low += int(torch.count_nonzero(chunk <= low))
        below_high += int(torch.count_nonzero(chunk < high))
        up_to_high += int(torch.count_nonzero(chunk <= high))
    if low == high:
        return below, up_to_low - below, 0, 0
    return below, up_to_low - below, below_high - up_to_low, up_to_high - below_high


def _narrower(chunks: Chunks, low: float, high: float, share: float, inside: int, size: int) -> tuple[float, float]:
    """A narrower bracket around the number that has `share` of the numbers inside (low, high) below it."""
    step = max(1, inside // size)
    picked = torch.cat([chunk[(chunk > low) & (chunk < high)][::step] for chunk in chunks()]).sort().values
    middle = min(int(share * len(picked)), len(picked) - 1)
    margin = int(WIDTH * (len(picked) * 0.25) ** 0.5) + 1
    return (
        float(picked[middle - margin]) if middle > margin else low,
        float(picked[middle + margin]) if middle + margin < len(picked) else high,
    )
