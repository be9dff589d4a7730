"""Worker processes that share one GPU: each is given what fits the pool that it has open, whoever is free is next."""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

from mergestream.runtime.parallel import set_up_worker, stop_workers

Task = TypeVar("Task")


def side_by_side(
    function: Callable[[Any, Task], Any],
    tasks: Sequence[Task],
    jobs: int,
    shared: Any,
    *,
    key: Callable[[Task], Hashable],
    may_start: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[Task, Any]]:
    """function(shared, task) of every task, as they end; tasks of one key go to as few processes as there is work for.

    `shared` is sent to each process once, and is the same object for all of its tasks. Nothing is begun once
    `may_start` says no. Without NVIDIA's multi-process service (nvidia-cuda-mps-control -d) a GPU serves one process
    at a time, and little is gained.
    """
    context = multiprocessing.get_context("spawn")
    crew = [ProcessPoolExecutor(1, context, _begin, (function, shared)) for _ in range(min(jobs, len(tasks)))]
    left, open_there, running = list(tasks), dict[int, Hashable](), dict[Future, tuple[int, Task]]()
    free = list(range(len(crew)))
    try:
        while left or running:
            while free and left and may_start():
                worker = free.pop()
                task = left.pop(_next_for(worker, left, open_there, key))
                open_there[worker] = key(task)
                running[crew[worker].submit(_work, task)] = worker, task
            if not running:
                return
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                worker, task = running.pop(ended)
                free.append(worker)
                yield task, ended.result()
    finally:
        for each in crew:
            stop_workers(each)


def _next_for(
    worker: int, left: Sequence[Task], open_there: dict[int, Hashable], key: Callable[[Task], Hashable]
) -> int:
    """Of what it has open; else of what the fewest others have, and most is left of."""
    waiting = Counter(key(task) for task in left)
    busy = Counter(held for other, held in open_there.items() if other != worker)
    best = min(waiting, key=lambda held: (held != open_there.get(worker), busy[held], -waiting[held]))
    return next(place for place, task in enumerate(left) if key(task) == best)


_given: Any = None


def _begin(function: Callable[[Any, Any], Any], shared: Any) -> None:
    global _given
    set_up_worker()
    _given = function, shared


def _work(task: Any) -> Any:
    function, shared = _given
    return function(shared, task)
