"""Gram matrices X^T X of the inputs of linear maps and convolutions, found by their weight, whoever calls them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# At most this many unfolded numbers at a time: a convolution's inputs are as many as its kernel times larger.
UNFOLDED = 1 << 25


@dataclass(frozen=True)
class Gram:
    """The mean of x x^T over rows x of inputs [groups,in,in], and how many rows it is of. Never changed in place."""

    mean: Tensor
    rows: int

    def __add__(self, other: Gram) -> Gram:
        rows = self.rows + other.rows
        return Gram(torch.lerp(self.mean, other.mean.to(self.mean), other.rows / rows), rows)


Grams = dict[str, Gram]


def add_grams(one: Grams, other: Grams) -> Grams:
    return {
        name: one[name] + other[name] if name in one and name in other else one.get(name) or other[name]
        for name in [*one, *(new for new in other if new not in one)]
    }


@contextmanager
def watch_inputs(weights: Mapping[str, Tensor], *, convolutions: bool = True) -> Iterator[Grams]:
    """Collect the Gram matrix of every layer that runs in the block and whose weight is given, by the weight's name.

    Weights are recognised by where they lie in memory. So a hook is not needed, which torch's own attention would
    bypass (its fused in_proj_weight belongs to no Linear), and a layer used twice counts twice.
    """
    watch = _Watch(weights, convolutions)
    with watch, torch.no_grad():
        yield watch.grams


class _Watch(TorchFunctionMode):
    def __init__(self, weights: Mapping[str, Tensor], convolutions: bool) -> None:
        super().__init__()
        self.grams: Grams = {}
        self._names = {(weight.data_ptr(), weight.shape): name for name, weight in weights.items()}
        self._convolutions = CONVOLUTIONS if convolutions else {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.linear:
            self._look(_linear_inputs, args, kwargs)
        elif function in self._convolutions:
            self._look(_convolution_inputs, args, kwargs)
        return function(*args, **kwargs)

    def _look(self, rows_of: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        name = self._names.get((call["weight"].data_ptr(), call["weight"].shape))
        if name is None:
            return
        gram = sum_of_grams(rows_of(**call))
        self.grams[name] = self.grams[name] + gram if name in self.grams else gram


def sum_of_grams(chunks: Iterable[Tensor]) -> Gram:
    """The Gram matrix of rows that come in chunks [groups,n,in]."""
    total, rows = None, 0
    for chunk in chunks:
        values = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
        product = values.transpose(-1, -2) @ values
        total = product if total is None else total.add_(product)
        rows += values.shape[1]
    assert total is not None
    return Gram(total / rows, rows)


def _linear_inputs(input: Tensor, weight: Tensor, **_: Any) -> Iterator[Tensor]:
    yield input.detach().reshape(1, -1, weight.shape[-1])


def _convolution_inputs(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,  # noqa: ARG001
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Iterator[Tensor]:
    """Every window the kernel sees, as rows [groups, windows, in/groups * kernel]; a few images at a time."""
    kernel = weight.shape[2:]
    strides, dilations = _each(stride, kernel), _each(dilation, kernel)
    images = functional.pad(input.detach(), _margins(padding, kernel, dilations))
    images = images if images.ndim == weight.ndim else images[None]
    per_image = images[0].numel() * kernel.numel() // max(1, torch.Size(strides).numel())
    for part in images.split(max(1, UNFOLDED // max(1, per_image))):
        windows = part
        for dim, (size, step, spread) in enumerate(zip(kernel, strides, dilations, strict=True), start=2):
            # Each unfolded dimension appends its kernel positions at the end.
            windows = windows.unfold(dim, (size - 1) * spread + 1, step)[..., ::spread]
        count = len(kernel)
        batch, channels = windows.shape[:2]
        windows = windows.reshape(batch, groups, channels // groups, *windows.shape[2:])
        places = range(3, 3 + count)
        taps = range(3 + count, 3 + 2 * count)
        yield windows.permute(1, 0, *places, 2, *taps).reshape(groups, -1, channels // groups * kernel.numel())


def _each(value: int | tuple[int, ...], kernel: torch.Size) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * len(kernel) if len(values) == 1 else values


def _margins(padding: int | str | tuple[int, ...], kernel: torch.Size, dilations: tuple[int, ...]) -> list[int]:
    """Padding as torch.nn.functional.pad wants it: last dimension first, before and after."""
    if padding == "valid":
        sides = [(0, 0)] * len(kernel)
    elif padding == "same":
        totals = [spread * (size - 1) for size, spread in zip(kernel, dilations, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        assert not isinstance(padding, str)
        sides = [(side, side) for side in _each(padding, kernel)]
    return list(itertools.chain.from_iterable(reversed(sides)))


# The order in which torch's functions take what they share; further ones are passed on by name or not needed here.
ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
