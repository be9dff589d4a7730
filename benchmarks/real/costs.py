"""What a step costs: milliseconds, and how many forward passes an image takes."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from answering import TargetData
from recipes import Profile
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from mergestream.methods import Method, create_method
from mergestream.pool.execution import Execution

WARM_UP = 10


def cost_of(method: Method, data: TargetData, profile: Profile) -> dict[str, Any]:
    """The median over timed steps on i.i.d. batches, each waited for; forwards are counted on eager steps."""
    batches = data.stream("iid", batch_size=profile.batch_size, seed=0)
    full = [torch.from_numpy(batch).to(data.images.device) for batch in batches if len(batch) == len(batches[0])]
    timings = []
    for number in range(WARM_UP + profile.timed_steps):
        images = data.images[full[number % len(full)]]
        _wait(images)
        began = time.perf_counter()
        method.step(images)
        _wait(images)
        timings.append(1000 * (time.perf_counter() - began))
    method.settle()
    return {
        "ms": round(statistics.median(timings[WARM_UP:]), 4),
        "forwards": forwards_per_image(method, data.images[full[0]]),
        "experts": len(method.pool),
        "batch_size": profile.batch_size,
        "dtype": str(method.pool.bank.dtype).removeprefix("torch."),
    }


def forwards_per_image(method: Method, images: torch.Tensor) -> float:
    """On the second step of a fresh, eager method: what it does once at the start is not a step's cost."""
    pool = method.pool.to(execution=Execution(capture=False))
    fresh = create_method(method.name, pool, **method.options())
    fresh.step(images)
    with _counted(type(pool.template.module)) as seen:
        fresh.step(images)
    return sum(seen) / len(images)


@contextmanager
def _counted(kind: type[nn.Module]) -> Iterator[list[int]]:
    """The number of images of every call of a whole network."""
    seen: list[int] = []

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        if type(module) is kind and given:
            seen.append(len(given[0]))

    hook = register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


def _wait(images: torch.Tensor) -> None:
    if images.device.type == "cuda":
        torch.cuda.synchronize()
