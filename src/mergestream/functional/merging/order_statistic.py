"""The exact k-th smallest of very many magnitudes, in one or two passes, without copying or sorting them all."""

import struct
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Half the width of the first bracket, in standard deviations of the rank of a sampled quantile.
WIDTH = 6
# At most this many magnitudes are copied out and sorted.
COPIED = 1 << 22

Chunks = Callable[[], Iterator[Tensor]]


def kth_smallest(chunks: Chunks, sample: Tensor, count: int, k: int, *, copied: int = COPIED) -> float:
    """The k-th smallest (from 1) of the `count` numbers >= 0 that each call of `chunks` yields.

    A sample brackets the answer; one pass counts the numbers below the bracket and sorts the few inside it. A bad
    sample, or millions of ties, only cost more passes.
    """
    if not 1 <= k <= count:
        raise ValueError(f"k must lie between 1 and {count}, got {k}")
    ordered = sample.sort().values
    rank, margin = (k - 0.5) / count * len(ordered), WIDTH * (len(ordered) / 4) ** 0.5 + 1
    low = float(ordered[max(int(rank - margin), 0)])
    high = float(ordered[min(int(rank + margin), len(ordered) - 1)])
    below, inside, copies = 0, 0, []
    for chunk in chunks():
        below += int(torch.count_nonzero(chunk < low))
        between = (chunk >= low) & (chunk <= high)
        inside += int(torch.count_nonzero(between))
        if inside <= copied:
            copies.append(chunk[between])
    if below < k <= below + inside:
        if low == high:
            return low
        if inside <= copied:
            return float(torch.cat(copies).kthvalue(k - below).values)
    return _bisect(chunks, k, sample.dtype)


def _bisect(chunks: Chunks, k: int, dtype: torch.dtype) -> float:
    """The smallest number with at least k numbers not above it, by bisection over all values of the type."""
    # Floats >= 0 are ordered like their bits.
    bits, number = ("<i", "<f") if dtype == torch.float32 else ("<q", "<d")
    low, high = 0, struct.unpack(bits, struct.pack(number, torch.finfo(dtype).max))[0]
    while low < high:
        middle = (low + high) // 2
        value = struct.unpack(number, struct.pack(bits, middle))[0]
        if sum(int(torch.count_nonzero(chunk <= value)) for chunk in chunks()) >= k:
            high = middle
        else:
            low = middle + 1
    return float(struct.unpack(number, struct.pack(bits, low))[0])
