"""How a pool's networks run on a CUDA device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.networks.preprocessing import Preprocessing
from mergestream.runtime.option_checks import whole_number, yes_or_no

WARM_UPS = 3


@dataclass(frozen=True)
class Execution:
    """Ways to run faster. A CPU ignores the first two.

    capture         record a step as one CUDA graph per shape of batch, where the method allows it; else all are eager
    overlap         how many experts may run at the same time on the device
    narrow_scores   experts answer batches in bfloat16, from a second bank; the merged model keeps the pool's type
    """

    capture: bool = True
    overlap: int = 4
    narrow_scores: bool = False

    def __post_init__(self) -> None:
        yes_or_no("capture", self.capture)
        yes_or_no("narrow_scores", self.narrow_scores)
        whole_number("overlap", self.overlap, low=1)


@dataclass
class Recording:
    """A step being recorded: answers are noted here, and those that are not finite refused later."""

    execution: Execution
    owners: list[str] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # of each owner [V,B,C], of V views of the images

    def note(self, owner: str, logits: Tensor) -> None:
        self.owners.append(owner)
        self.logits.append(logits)

    def side_by_side(self, tasks: Sequence[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
        """Run the tasks; on a CUDA device `overlap` of them at a time, each on its own stream."""
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

    def both(self, first: Callable[[], Any], second: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
        """Run two tasks; on a CUDA device beside each other, unless experts run one after the other."""
        if device.type != "cuda" or self.execution.overlap == 1:
            return first(), second()
        here, (side,) = torch.cuda.current_stream(device), _side_streams(device, 1)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            one = first()
        two = second()
        here.wait_stream(side)
        return one, two


def warm_up(function: Callable[[], object]) -> None:
    """Call a function before it is recorded, so that what a first call creates lies outside the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(side)


@lru_cache(maxsize=8)
def _side_streams(device: torch.device, count: int) -> tuple[torch.cuda.Stream, ...]:
    """Always the same streams: libraries keep a workspace for each stream they have seen."""
    return tuple(torch.cuda.Stream(device) for _ in range(count))


@contextmanager
def replaced_forward(modules: Sequence[nn.Module], forward: Callable[..., Tensor]) -> Iterator[None]:
    """Let `forward(module, ...)` answer for each module inside the block."""
    try:
        for module in modules:
            module.forward = MethodType(forward, module)
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)  # the class's own again


def patches_as_products(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Compute convolutions that cut an image into patches as matrix products, inside the block."""
    convolutions = [each for module in modules for each in module.modules() if _cuts_patches(each)]
    return replaced_forward(convolutions, patch_product)


def _cuts_patches(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and module.kernel_size == module.stride
        and module.kernel_size[0] >= 4
        and module.groups == 1
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
    )


def patch_product(convolution: nn.Conv2d, images: Tensor) -> Tensor:
    """Convolve where the stride is the kernel: every patch [c·h·w] times one matrix."""
    high, wide = convolution.kernel_size
    count, channels, height, width = images.shape
    rows, columns = height // high, width // wide
    patches = images[:, :, : rows * high, : columns * wide].reshape(count, channels, rows, high, columns, wide)
    flat = patches.permute(0, 2, 4, 1, 3, 5).reshape(count * rows * columns, channels * high * wide)
    product = nn.functional.linear(flat, convolution.weight.flatten(1), convolution.bias)
    return product.reshape(count, rows, columns, -1).permute(0, 3, 1, 2)


def memory_format(network: nn.Module, weights: Tensor, preprocessing: Preprocessing | None) -> torch.memory_format:
    """Channels last on a CPU in narrow types, where convolutions are faster so; not if the network refuses it."""
    if weights.device.type != "cpu" or weights.dtype == torch.float32 or preprocessing is None:
        return torch.contiguous_format
    image = torch.zeros(1, 3, *preprocessing.size, dtype=weights.dtype).to(memory_format=torch.channels_last)
    try:
        with torch.no_grad():
            network(image)
    except RuntimeError:  # it calls view() on its input
        return torch.contiguous_format
    return torch.channels_last
