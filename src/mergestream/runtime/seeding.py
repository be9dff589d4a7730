"""What decides the bits of a result on a CPU: the random sequence and the number of threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A block with its own random sequence; the caller's generators are left as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """A block with a fixed number of threads: it fixes the order of sums, and small networks gain from one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
