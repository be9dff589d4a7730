"""The blocks of a network, one after the other, and what flows into each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.networks.architecture import logits_of
from mergestream.runtime.errors import NetworkError

# Where the libraries keep the blocks of their ViTs and ResNets, as paths from the network down.
PATHS: tuple[str, ...] = (
    r"blocks\.\d+",  # timm ViT
    r"encoder\.layers\.encoder_layer_\d+",  # torchvision ViT
    r"(\w+\.)*encoder\.layers?\.\d+",  # Hugging Face ViT, DeiT, CLIP's vision tower
    r"vit\.layers\.\d+",  # Hugging Face ViT, newer
    r"layer[1-4]\.\d+",  # timm and torchvision ResNet
    r"(\w+\.)*encoder\.stages\.\d+\.layers\.\d+",  # Hugging Face ResNet
)
# Paths under which other networks keep what is no chain of blocks.
OF_ONE_KIND = {"ResNetV2": (r"stages\.\d+\.blocks\.\d+",)}
_UNKNOWN = (
    "{} cannot be merged block by block: it is not known which of its parts run one after the other, as the blocks of "
    "timm, torchvision and Hugging Face ViTs and ResNets do. Use 'regmean' instead."
)
Call = tuple[tuple[Any, ...], dict[str, Any]]


def find_blocks(module: nn.Module) -> list[str]:
    """The names of a network's blocks in order of depth; refuses a network whose blocks are not known."""
    for path in (*PATHS, *OF_ONE_KIND.get(type(module).__name__, ())):
        found = [name for name, _ in module.named_modules() if re.fullmatch(path, name)]
        if found:
            return found
    raise NetworkError(_UNKNOWN.format(type(module).__name__))


class _Reached(Exception):  # noqa: N818
    """Not an error: the forward pass got as far as it was needed."""


class Blocks:
    """A network taken apart at its blocks. What lies before, between and behind them is left to its own forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = find_blocks(module)
        self._modules = [module.get_submodule(name) for name in self.names]

    def __len__(self) -> int:
        return len(self.names)

    def first_call(self, batch: Tensor) -> Call:
        """What block 0 is called with."""
        return self._until(0, batch)

    def run(self, block: int, call: Call) -> Any:
        args, kwargs = call
        return self._modules[block](*args, **kwargs)

    def next_call(self, block: int, call: Call, batch: Tensor) -> Call:
        """What block + 1 is called with, after this block got `call`; earlier blocks are not run again."""
        with self._answering(block, self.run(block, call)):
            return self._until(block + 1, batch)

    def finish(self, call: Call, batch: Tensor) -> Any:
        """Run what lies behind the last block, after that one got `call`."""
        last = len(self) - 1
        with self._answering(last, self.run(last, call)):
            return self.module(batch)

    def require_chain(self, batch: Tensor) -> None:
        """Refuse a network that is not its blocks one after the other: parallel, reversed or repeated ones."""
        expected = logits_of(self.module(batch))
        try:
            call = self.first_call(batch)
            for block in range(len(self) - 1):
                call = self.next_call(block, call, batch)
            found = logits_of(self.finish(call, batch))
        except (NetworkError, RuntimeError, IndexError, TypeError, ValueError):
            found = torch.full_like(expected, torch.nan)
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
            raise NetworkError(_UNKNOWN.format(type(self.module).__name__))

    def _until(self, block: int, batch: Tensor) -> Call:
        seen: list[Call] = []

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append((args, kwargs))
            raise _Reached

        handle = self._modules[block].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.module(batch)
        except _Reached:
            return seen[0]
        finally:
            handle.remove()
        raise NetworkError(f"The block '{self.names[block]}' of {type(self.module).__name__} was never called.")

    @contextmanager
    def _answering(self, last: int, answer: Any) -> Iterator[None]:
        """Let every block up to `last` return its known answer, so that only what comes after it is computed."""
        for block in self._modules[: last + 1]:
            block.forward = lambda *_, **__: answer
        try:
            yield
        finally:
            for block in self._modules[: last + 1]:
                del block.forward
