"""Independent jobs with results in order: in local processes of one thread each, or on a Ray cluster."""

import ctypes
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from mergestream.runtime.errors import InputError, WorkerError, require_known
from mergestream.runtime.plugins import load_plugins, plugins_for_workers

Result = TypeVar("Result")


class Advance(Protocol):
    """Progress callback: how many steps were done, and an optional note."""

    def __call__(self, steps: int = 1, note: str = "") -> None: ...


# Opens a stage of work from its title and its number of steps.
Track = Callable[[str, int], AbstractContextManager[Advance]]
ENGINES = ("local", "ray")


def quiet(*_: object) -> AbstractContextManager[Advance]:
    """A `Track` that shows nothing."""
    return nullcontext(lambda *_, **__: None)


def default_workers(device: str) -> int:
    """One process per core, or per GPU where GPUs do the work."""
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    return gpus or os.cpu_count() or 1


def run_jobs(
    function: Callable[..., Result],
    jobs: Sequence[tuple[Any, ...]],
    *,
    workers: int,
    on_done: Callable[[], None],
    engine: str = "local",
    device: str = "cpu",
) -> list[Result]:
    """Call function(*job) for every job, and `on_done` after each.

    Locally one worker means this process. On Ray the cluster decides how many run at once. Jobs on a `device` other
    than the CPU get one GPU each where there are any: locally in turn, on Ray as the cluster assigns them.
    """
    require_known("engine", engine, ENGINES)
    if workers < 1:
        raise InputError(f"--jobs is at least 1, got {workers}.")
    if engine == "ray":
        return _on_ray(function, jobs, on_done, device)
    if workers <= 1 or len(jobs) <= 1:
        results = []
        for job in jobs:
            results.append(function(*job))
            on_done()
        return results
    # spawn, not fork: a forked child inherits torch's thread pool in a state that can hang.
    context = multiprocessing.get_context("spawn")
    turns = context.SimpleQueue()
    for number in range(min(workers, len(jobs))):
        turns.put(number)
    gpus = [] if device == "cpu" else visible_gpus()
    executor = ProcessPoolExecutor(min(workers, len(jobs)), context, _start_worker, (turns, gpus))
    plugins = plugins_for_workers(with_script=False)
    futures = [executor.submit(_in_one_thread, plugins, function, job) for job in jobs]
    for future in futures:
        future.add_done_callback(lambda done: None if done.cancelled() else on_done())
    try:
        results = [future.result() for future in futures]
    except BaseException as error:
        _stop_workers(executor, futures)
        if isinstance(error, BrokenProcessPool):
            raise WorkerError(
                "A worker process was killed, most likely because memory ran out. Finished jobs are saved: try again "
                "with fewer --jobs."
            ) from error
        raise
    executor.shutdown()
    return results


def visible_gpus() -> list[str]:
    """CUDA's names of the GPUs that this process may use."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    return named[:count] if named else [str(number) for number in range(count)]


def _start_worker(turns: Any, gpus: Sequence[str]) -> None:
    """Set up a worker: one thread, one GPU if there are several. It dies with its parent and leaves Ctrl-C to it."""
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[turns.get() % len(gpus)]
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_death_signal = getattr(ctypes.CDLL(None), "prctl", None)
    if set_death_signal is not None:  # Linux
        set_death_signal(1, signal.SIGKILL)


def _stop_workers(executor: ProcessPoolExecutor, futures: Sequence[Future]) -> None:
    """Stop at once, without waiting for running jobs: their finished parts are on disk."""
    for future in futures:
        future.cancel()
    for process in list((executor._processes or {}).values()):
        process.terminate()
    executor.shutdown(wait=True, cancel_futures=True)


def _on_ray(
    function: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], on_done: Callable[[], None], device: str
) -> list[Result]:
    """Run one Ray task per job, with one core each, and one GPU each if the device asks for it and the cluster has any.

    RAY_ADDRESS names the cluster; without it one is started on this machine.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError("The engine 'ray' needs Ray: pip install 'mergestream[ray]'.") from error
    started_here = not ray.is_initialized()
    if started_here:
        require_reachable(os.environ.get("RAY_ADDRESS", ""))
        ray.init(logging_level="ERROR", log_to_driver=False)
    try:
        # A lost worker or node is tried again elsewhere; an error of the job itself is not.
        gpus = 1 if device != "cpu" and ray.cluster_resources().get("GPU", 0) else 0
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=3)(_in_one_thread)
        plugins = plugins_for_workers(with_script=True)
        results = waiting = [task.remote(plugins, function, job) for job in jobs]
        while waiting:
            (ready,), waiting = ray.wait(waiting, num_returns=1)
            ray.get(ready)  # raises the job's error at once
            on_done()
        return ray.get(results)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise WorkerError(f"The Ray cluster failed: {error}. Finished jobs are saved: try again.") from error
    finally:
        if started_here:
            ray.shutdown()


def require_reachable(address: str) -> None:
    """Check the address first: Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise WorkerError(f"No Ray cluster answers at RAY_ADDRESS={address}: {error}.") from error


def _in_one_thread(plugins: Sequence[str], function: Callable[..., Result], job: tuple[Any, ...]) -> Result:
    torch.set_num_threads(1)
    load_plugins(plugins, must_register=False)  # the same methods and data sets as in the process that sent the job
    return function(*job)
