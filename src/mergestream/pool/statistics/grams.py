"""Gram matrices X^T X of the inputs of linear maps and convolutions, recognised by their weights."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

# At most this many unfolded numbers at a time: unfolding multiplies a convolution's inputs by its kernel size.
UNFOLDED = 1 << 25
LARGE = 1024  # inputs of a layer from which half of a Gram matrix is not computed, but copied


@dataclass(frozen=True)
class Gram:
    """Mean of x x^T over rows x of inputs [groups,in,in], and the number of rows. Never changed in place."""

    mean: Tensor
    rows: int

    def __add__(self, other: "Gram") -> "Gram":
        rows = self.rows + other.rows
        return Gram(torch.lerp(self.mean, other.mean.to(self.mean), other.rows / rows), rows)


Grams = dict[str, Gram]


def add_grams(one: Grams, other: Grams) -> Grams:
    return {**one, **other, **{name: one[name] + other[name] for name in one if name in other}}


@contextmanager
def watch_inputs(weights: Mapping[str, Tensor], *, convolutions: bool = True) -> Iterator[Grams]:
    """Collect the Gram matrices of all layers with the given weights that run in the block, by the weight's name.

    Weights are recognised by their address in the operations that torch carries out. Hooks would miss torch's own
    attention, whose fused in_proj_weight belongs to no Linear. A layer used twice counts twice.
    """
    watch = _Watch(weights, convolutions)
    fused = torch.backends.mha.get_fastpath_enabled()
    # The fused inference kernel of torch's attention hides the matrix products.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        # Autocast multiplies by copies of the weights, which are not recognised, and rounds the inputs.
        with watch, torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield watch.grams
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


class _Watch(TorchDispatchMode):
    def __init__(self, weights: Mapping[str, Tensor], convolutions: bool) -> None:
        super().__init__()
        self.grams: Grams = {}
        self._weights = {weight.data_ptr(): (name, weight) for name, weight in weights.items()}
        self._inputs_of = {**PRODUCTS, **(CONVOLUTIONS if convolutions else {})}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        entry = self._inputs_of.get(function)
        if entry is not None:
            place, rows_of = entry
            name, weight = self._weights.get(args[place].data_ptr(), ("", None))
            rows = None if weight is None else rows_of(weight, *args)
            if rows is not None:
                gram = gram_of(rows)
                self.grams[name] = self.grams[name] + gram if name in self.grams else gram
        return function(*args, **(kwargs or {}))


def gram_of(chunks: Iterable[Tensor]) -> Gram:
    """Gram matrix of rows in chunks [groups,n,in]."""
    total, rows = None, 0
    for chunk in chunks:
        values = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
        product = _self_product(values)
        total = product if total is None else total.add_(product)
        rows += values.shape[1]
    assert total is not None
    return Gram(total / rows, rows)


def _self_product(rows: Tensor) -> Tensor:
    """X^T X [groups,in,in], which is symmetric: for a large layer blocks below the diagonal are copied."""
    columns, inputs = rows.transpose(-1, -2), rows.shape[-1]
    if inputs < LARGE:
        return columns @ rows
    product, step = rows.new_empty(len(rows), inputs, inputs), -(-inputs // 4)
    for start in range(0, inputs, step):
        part = columns[:, start : start + step] @ rows[..., start:]
        product[:, start : start + step, start:] = part
        product[:, start:, start : start + step] = part.transpose(-1, -2)
    return product


def _linear_inputs(weight: Tensor, input: Tensor, used: Tensor, *_: Any) -> Iterable[Tensor] | None:
    """x W^T as torch.nn.functional.linear calls it."""
    return [input.reshape(1, -1, weight.shape[-1])] if used.shape == weight.shape else None


def _product_inputs(weight: Tensor, left: Tensor, right: Tensor, *_: Any) -> Iterable[Tensor] | None:
    """x W^T as a product with the transposed weight, possibly shared by a batch; x W is another map."""
    transposed = weight.ndim == 2 and right.shape[-2:] == weight.T.shape and right.stride()[-2:] == weight.T.stride()
    shared = right.ndim == 2 or right.stride(0) == 0
    return [left.reshape(1, -1, weight.shape[-1])] if transposed and shared else None


def _general_convolution_inputs(weight: Tensor, *arguments: Any) -> Iterable[Tensor] | None:
    """Those of torch's general form, which is also that of transposed convolutions: another map."""
    images, used, bias, stride, padding, dilation, transposed, _, groups = arguments
    if transposed or used.shape != weight.shape:
        return None
    return convolution_inputs(weight, images, used, bias, stride, padding, dilation, groups)


def convolution_inputs(
    weight: Tensor,
    input: Tensor,
    used: Tensor,  # noqa: ARG001
    bias: Tensor | None = None,  # noqa: ARG001
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Iterator[Tensor]:
    """All windows of the kernel as rows [groups, windows, in/groups * kernel], a few images at a time."""
    kernel = weight.shape[2:]
    strides, dilations = _each(stride, kernel), _each(dilation, kernel)
    images = functional.pad(input, _margins(padding, kernel, dilations))
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


def _each(value: int | Sequence[int], kernel: torch.Size) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * len(kernel) if len(values) == 1 else values


def _margins(padding: int | str | Sequence[int], kernel: torch.Size, dilations: tuple[int, ...]) -> list[int]:
    """Padding as torch.nn.functional.pad takes it: last dimension first, before and after."""
    if padding == "valid":
        sides = [(0, 0)] * len(kernel)
    elif padding == "same":
        totals = [spread * (size - 1) for size, spread in zip(kernel, dilations, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        assert not isinstance(padding, str)
        sides = [(side, side) for side in _each(padding, kernel)]
    return list(itertools.chain.from_iterable(reversed(sides)))


aten = torch.ops.aten
InputsOf = Callable[..., Iterable[Tensor] | None]
# Which argument is the weight, and how to get its input rows. Shapes and gradients decide which form of an operation
# torch carries out, so all of them are listed.
PRODUCTS: dict[Any, tuple[int, InputsOf]] = {
    aten.linear.default: (1, _linear_inputs),
    aten.mm.default: (1, _product_inputs),
    aten.bmm.default: (1, _product_inputs),
    aten.addmm.default: (2, lambda weight, _, left, right: _product_inputs(weight, left, right)),  # b + x W^T
}
CONVOLUTIONS: dict[Any, tuple[int, InputsOf]] = {
    aten.convolution.default: (1, _general_convolution_inputs),
    **{
        form: (1, convolution_inputs)
        for convolution in (aten.conv1d, aten.conv2d, aten.conv3d)
        for form in (convolution.default, convolution.padding)
    },
}
