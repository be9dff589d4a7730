"""Reproducible results on a CPU: the random seed and the number of threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the block's random numbers; the caller's generators are restored afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Fix the number of threads in the block: it decides the order of sums, and small networks run faster with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
