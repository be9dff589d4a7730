"""How a pool's networks are run on a CUDA device, where there is a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn

from mergestream.runtime.option_checks import whole_number, yes_or_no

WARM_UPS = 3


@dataclass(frozen=True)
class Execution:
    """What may be done for speed; none of it is asked of a CPU.

    capture   record a step as one CUDA graph per shape of batch, where the method allows it; else every step is eager
    overlap   how many experts may run beside each other on the device
    """

    capture: bool = True
    overlap: int = 4

    def __post_init__(self) -> None:
        yes_or_no("capture", self.capture)
        whole_number("overlap", self.overlap, low=1)


@dataclass
class Recording:
    """A step being recorded: what would be refused is noted, by whose answer it was, and looked at later."""

    execution: Execution
    owners: list[str] = field(default_factory=list)
    finite: list[Tensor] = field(default_factory=list)  # one [B] for each of them, on the device

    def note(self, owner: str, finite: Tensor) -> None:
        self.owners.append(owner)
        self.finite.append(finite)

    def side_by_side(self, tasks: Sequence[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
        """The tasks' results; on a CUDA device `overlap` of them at a time, each on a stream of its own."""
        streams = min(self.execution.overlap, len(tasks))
        if device.type != "cuda" or streams == 1:
            return [task() for task in tasks]
        here, sides = torch.cuda.current_stream(device), _side_streams(device, streams)
        for side in sides:
            side.wait_stream(here)
        results = []
        for number, task in enumerate(tasks):
            with torch.cuda.stream(sides[number % streams]):
                results.append(task())
        for side in sides:
            here.wait_stream(side)
        return results


def warm_up(function: Callable[[], object]) -> None:
    """Before a graph is recorded: everything that is made or chosen on a first call is made outside the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(side)


@lru_cache(maxsize=8)
def _side_streams(device: torch.device, count: int) -> tuple[torch.cuda.Stream, ...]:
    """Always the same ones: libraries keep a workspace for every stream they have seen."""
    return tuple(torch.cuda.Stream(device) for _ in range(count))


@contextmanager
def patches_as_products(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block convolutions that cut an image into patches are matrix products."""
    convolutions = [each for module in modules for each in module.modules() if _cuts_patches(each)]
    try:
        for convolution in convolutions:
            convolution.__class__ = _PatchProduct  # a type, not a closure: compiled code is shared by all of them
        yield
    finally:
        for convolution in convolutions:
            convolution.__class__ = nn.Conv2d


def _cuts_patches(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and module.kernel_size == module.stride
        and module.kernel_size[0] >= 4
        and module.groups == 1
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
    )


class _PatchProduct(nn.Conv2d):
    """A convolution whose stride is its kernel: every patch [c·h·w] times one matrix."""

    def forward(self, input: Tensor) -> Tensor:
        high, wide = self.kernel_size
        count, channels, height, width = input.shape
        rows, columns = height // high, width // wide
        patches = input[:, :, : rows * high, : columns * wide].reshape(count, channels, rows, high, columns, wide)
        flat = patches.permute(0, 2, 4, 1, 3, 5).reshape(count * rows * columns, channels * high * wide)
        answer = nn.functional.linear(flat, self.weight.flatten(1), self.bias)
        return answer.reshape(count, rows, columns, -1).permute(0, 3, 1, 2)
