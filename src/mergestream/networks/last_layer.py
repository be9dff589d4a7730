"""The linear layer that writes a network's logits: where its numbers lie, and what it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mergestream.networks.flat_layout import Layout, LayoutEntry
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
        name, last = [named for named in inside if not isinstance(named[1], IDLE)][-1]
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
    def recorded_inputs(self, module: nn.Module) -> Iterator[list[Tensor]]:
        """Collect the inputs of the module's last layer while the block lasts."""
        inputs: list[Tensor] = []
        hook = module.get_submodule(self.name).register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        try:
            yield inputs
        finally:
            hook.remove()


def require_one_row_per_image(inputs: Tensor, images: int) -> Tensor:
    """Inputs [B,D] of a last layer in fp32; refused where it reads something else of an image."""
    if inputs.ndim != 2 or len(inputs) != images:
        raise NetworkError(
            f"The last layer read {tuple(inputs.shape)} for {images} images, not one per image; it cannot be fitted."
        )
    return inputs.float()


def class_entries(layout: Layout, head: str, classes: int) -> list[LayoutEntry]:
    """Weights and biases in one part of the head that have one row per class, in order."""
    inside = [entry for entry in layout.entries if entry.start >= layout.encoder_size]
    return [entry for entry in inside if entry.name.startswith(f"{head}.") and entry.shape[:1] == (classes,)]
