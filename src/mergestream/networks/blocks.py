"""A network as a chain of blocks, and the inputs of each block."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.networks.architecture import logits_of
from mergestream.runtime.errors import NetworkError

# Names of the blocks in the libraries' ViTs and ResNets.
PATHS: tuple[str, ...] = (
    r"blocks\.\d+",  # timm ViT
    r"encoder\.layers\.encoder_layer_\d+",  # torchvision ViT
    r"(\w+\.)*encoder\.layers?\.\d+",  # Hugging Face ViT, DeiT, CLIP's vision tower
    r"vit\.layers\.\d+",  # Hugging Face ViT, newer
    r"layer[1-4]\.\d+",  # timm and torchvision ResNet
    r"(\w+\.)*encoder\.stages\.\d+\.layers\.\d+",  # Hugging Face ResNet
)
# Names that are blocks in one class only; in other networks they are not a chain.
OF_ONE_KIND = {"ResNetV2": (r"stages\.\d+\.blocks\.\d+",)}
_UNKNOWN = (
    "{} cannot be merged block by block: its blocks are not known. Those of timm, torchvision and Hugging Face ViTs "
    "and ResNets are. Use 'regmean' instead."
)
Call = tuple[tuple[Any, ...], dict[str, Any]]


def find_blocks(module: nn.Module) -> list[str]:
    """Names of a network's blocks in order of depth; refuse a network whose blocks are not known."""
    for path in (*PATHS, *OF_ONE_KIND.get(type(module).__name__, ())):
        names = [name for name, _ in module.named_modules() if re.fullmatch(path, name)]
        if names:
            return names
    raise NetworkError(_UNKNOWN.format(type(module).__name__))


class _Reached(Exception):  # noqa: N818
    """Stops a forward pass that has reached the block."""


class Blocks:
    """A network run block by block. Its own forward does everything before, between and after the blocks."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = find_blocks(module)
        self._modules = [module.get_submodule(name) for name in self.names]

    def __len__(self) -> int:
        return len(self.names)

    def run(self, block: int, call: Call) -> Any:
        args, kwargs = call
        return self._modules[block](*args, **kwargs)

    def next_call(self, block: int, call: Call, batch: Tensor) -> Call:
        """Arguments of block + 1, after this block got `call`; earlier blocks do not run again."""
        with self._answering(block, self.run(block, call)):
            return self.call_of(block + 1, batch)

    def finish(self, call: Call, batch: Tensor) -> Any:
        """Run the part after the last block, which gets `call`."""
        last = len(self) - 1
        with self._answering(last, self.run(last, call)):
            return self.module(batch)

    def require_chain(self, batch: Tensor) -> None:
        """Refuse a network whose blocks do not run one after the other: parallel, reversed or repeated."""
        expected = logits_of(self.module(batch))
        try:
            call = self.call_of(0, batch)
            for block in range(len(self) - 1):
                call = self.next_call(block, call, batch)
            logits = logits_of(self.finish(call, batch))
        except (NetworkError, RuntimeError, IndexError, TypeError, ValueError):
            logits = torch.full_like(expected, torch.nan)
        if logits.shape != expected.shape or not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3):
            raise NetworkError(_UNKNOWN.format(type(self.module).__name__))

    def call_of(self, block: int, batch: Tensor) -> Call:
        """Arguments that a block gets; the forward pass stops there."""
        calls: list[Call] = []

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args, kwargs))
            raise _Reached

        with self._modules[block].register_forward_pre_hook(stop, with_kwargs=True), suppress(_Reached):
            self.module(batch)
        if calls:
            return calls[0]
        raise NetworkError(f"The block '{self.names[block]}' of {type(self.module).__name__} was never called.")

    @contextmanager
    def _answering(self, last: int, answer: Any) -> Iterator[None]:
        """Let every block up to `last` return `answer`, so that only the later ones are computed."""
        for block in self._modules[: last + 1]:
            block.forward = lambda *_, **__: answer
        try:
            yield
        finally:
            for block in self._modules[: last + 1]:
                del block.forward
