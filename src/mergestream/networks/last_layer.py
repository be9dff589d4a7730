"""The linear layer that writes a network's logits: where its numbers lie, and what it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mergestream.networks.flat_layout import Layout
from mergestream.runtime.errors import NetworkError

IDLE = nn.Identity | nn.Dropout  # what changes nothing outside training


@dataclass(frozen=True)
class LastLayer:
    """Its name, and the places of weight [C,D] and bias [C] in the flat vector [P]."""

    name: str
    weight: slice
    bias: slice
    shape: torch.Size

    @classmethod
    def of(cls, module: nn.Module, head: tuple[str, ...], layout: Layout, classes: int) -> LastLayer | None:
        """None where the head is of several parts, or does not end in a linear layer of its own with a bias."""
        if len(head) != 1:
            return None
        inside = module.get_submodule(head[0]).named_modules(prefix=head[0])
        name, last = [found for found in inside if not isinstance(found[1], IDLE)][-1]
        entries = {entry.name: entry for entry in layout.entries if not entry.tied}
        weight, bias = entries.get(f"{name}.weight"), entries.get(f"{name}.bias")
        if type(last) is not nn.Linear or weight is None or bias is None or weight.shape[0] != classes:
            return None
        return cls(name, slice(weight.start, weight.stop), slice(bias.start, bias.stop), weight.shape)

    def of_weights(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Weight [C,D] and bias [C] in flat weights [P], in fp32."""
        return weights[self.weight].view(self.shape).float(), weights[self.bias].float()

    def write(self, weights: Tensor, weight: Tensor, bias: Tensor) -> None:
        """Put weight [C,D] and bias [C] into flat weights [P]."""
        weights[self.weight] = weight.flatten().to(weights.dtype)
        weights[self.bias] = bias.to(weights.dtype)

    @contextmanager
    def remembering(self, module: nn.Module) -> Iterator[Remembering]:
        """Inside the block the module's last layer keeps what it read last."""
        layer = module.get_submodule(self.name)
        layer.__class__ = Remembering  # a type, not a hook: compiled code tells them apart
        try:
            yield layer  # type: ignore[misc]
        finally:
            layer.__class__ = nn.Linear
            vars(layer).pop("read", None)


class Remembering(nn.Linear):
    """A linear layer that keeps its input."""

    read: Tensor

    def forward(self, input: Tensor) -> Tensor:
        self.read = input
        return super().forward(input)

    def inputs(self, images: int) -> Tensor:
        """What it read of a batch, [B,D] in fp32."""
        if self.read.ndim != 2 or len(self.read) != images:
            raise NetworkError(
                f"The last layer read {tuple(self.read.shape)} for {images} images, not one row an image; "
                f"it cannot be fitted."
            )
        return self.read.float()
