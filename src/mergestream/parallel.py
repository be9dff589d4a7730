"""Independent jobs on all cores: one process a core, one thread each, results in the order of the jobs."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def run_jobs(
    function: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], *, workers: int, on_done: Callable[[], None]
) -> list[Result]:
    """function(*job) for every job. With one worker all run in this process; `on_done` is called after each."""
    if workers <= 1 or len(jobs) <= 1:
        results = []
        for job in jobs:
            results.append(function(*job))
            on_done()
        return results
    # spawn, not fork: a forked child inherits torch's thread pool in a state that can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), context, torch.set_num_threads, (1,)) as executor:
        futures = [executor.submit(function, *job) for job in jobs]
        for future in futures:
            future.add_done_callback(lambda _: on_done())
        try:
            return [future.result() for future in futures]
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
