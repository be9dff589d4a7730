"""Jobs in processes: their order, and which GPU each worker sees."""

import os
from collections.abc import Callable

import pytest
import torch

from mergestream.runtime import parallel
from mergestream.runtime.parallel import default_workers, quiet, run_jobs, visible_gpus


def visible(_: int) -> str | None:
    import time

    time.sleep(0.3)  # so that no worker takes all jobs
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.slow
def test_each_worker_process_sees_one_gpu(gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus(2)
    seen = run_jobs(visible, [(n,) for n in range(4)], workers=2, on_done=lambda: None, device="auto")
    assert set(seen) == {"0", "1"}
    assert set(run_jobs(visible, [(n,) for n in range(2)], workers=2, on_done=lambda: None)) == {None}


def test_only_the_gpus_of_this_process_are_used(gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    assert default_workers("auto") == default_workers("cuda") == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    assert visible_gpus() == ["5", "GPU-7"]
    gpus(1)
    assert visible_gpus() == ["5"]


def test_without_a_gpu_there_is_one_worker_per_core(gpus: Callable[[int], None]) -> None:
    gpus(0)
    assert default_workers("auto") == default_workers("cpu") == os.cpu_count()
    assert parallel.visible_gpus() == []


def test_a_quiet_track_accepts_every_call() -> None:
    with quiet("title", 3) as advance:
        advance()
        advance(2, "words")
        advance(steps=1, note="words")
