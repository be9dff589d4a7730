"""Layers that a merge treats apart: the linear one that writes the logits, and BatchNorm, whose averages do not fit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mergestream.networks.flat_layout import Layout, LayoutEntry
from mergestream.runtime.errors import NetworkError

BatchNorm = _BatchNorm
IDLE = nn.Identity | nn.Dropout  # what changes nothing outside training


@dataclass(frozen=True)
class LastLayer:
    """Its name, and the places of weight [C,D] and bias [C] in the flat vector [P]."""

    name: str
    weight: slice
    bias: slice
    shape: torch.Size

    @classmethod
    def of(cls, module: nn.Module, head: tuple[str, ...], layout: Layout, classes: int) -> "LastLayer | None":
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
    def recorded_inputs(self, module: nn.Module, images: Tensor | None = None) -> Iterator[list[Tensor]]:
        """Collect the inputs of the module's last layer while the block lasts; if given, of these images alone."""
        inputs: list[Tensor] = []
        passing: list[Tensor] = []  # what the network reads in the present pass

        def note(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            if images is None or (passing and passing[-1] is images):
                inputs.append(given[0])

        read = module.register_forward_pre_hook(lambda _, given: passing.append(given[0]))
        with read, module.get_submodule(self.name).register_forward_pre_hook(note):
            yield inputs


def class_entries(layout: Layout, head: str, classes: int) -> list[LayoutEntry]:
    """Weights and biases in one part of the head that have one row per class, in order."""
    inside = [entry for entry in layout.entries if entry.start >= layout.encoder_size]
    return [entry for entry in inside if entry.name.startswith(f"{head}.") and entry.shape[:1] == (classes,)]


def batchnorm_layers(module: nn.Module) -> list[BatchNorm]:
    """The module's BatchNorm layers that have a running mean and variance, in order."""
    return [layer for layer in module.modules() if isinstance(layer, BatchNorm) and layer.running_mean is not None]


@contextmanager
def with_inputs(layers: Sequence[BatchNorm], receive: Callable[[int, BatchNorm, Tensor], None]) -> Iterator[None]:
    """While the block lasts, call receive(place, layer, inputs [B,c,...]) before a layer runs."""

    def hook(place: int) -> Callable[[BatchNorm, tuple[Tensor, ...]], None]:
        return lambda layer, given: receive(place, layer, given[0])

    with ExitStack() as hooks:
        for place, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_pre_hook(hook(place)))
        yield


@torch.no_grad()
def reestimate(module: nn.Module, batch: Tensor) -> bool:
    """Overwrite every BatchNorm layer's running mean and variance with those of batch [B,c,H,W], in one forward pass.

    A layer that sees a single value per channel cannot estimate a variance; its statistics are unchanged. Returns
    whether the network has such layers, and so ran.
    """
    layers = batchnorm_layers(module)
    if layers:
        with with_inputs(layers, _measure):
            module(batch)
    return bool(layers)


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """Let BatchNorm layers normalise by the batch's own statistics inside the block; gradients flow through them.

    A layer that sees a single value per channel uses its running statistics.
    """
    layers = batchnorm_layers(module)
    stored = {layer: (layer.running_mean, layer.running_var) for layer in layers}

    def without(layer: BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].numel() // inputs[0].shape[1] > 1:
            layer.running_mean = layer.running_var = None

    def restore(layer: BatchNorm, *_: object) -> None:
        layer.running_mean, layer.running_var = stored[layer]

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(restore, layer)
            hooks.enter_context(layer.register_forward_pre_hook(without))
            hooks.enter_context(layer.register_forward_hook(restore))
        yield


def norm_parameters(module: nn.Module) -> list[str]:
    """Names of the affine parameters of all normalisation layers, in the order of the modules."""
    layers = [(path, layer) for path, layer in module.named_modules() if _is_norm(layer)]
    return [
        f"{path}.{name}" if path else name
        for path, layer in layers
        for name, values in layer.named_parameters(recurse=False)
        if values.ndim == 1
    ]


def _is_norm(layer: nn.Module) -> bool:
    """Libraries and users write their own, so the name of the class or of one that it is built on decides."""
    return any("norm" in kind.__name__.lower() for kind in type(layer).__mro__)


def _measure(place: int, layer: BatchNorm, inputs: Tensor) -> None:  # noqa: ARG001
    values = inputs.float()
    dims = [dim for dim in range(values.ndim) if dim != 1]
    if values.numel() // values.shape[1] < 2:
        return
    assert layer.running_mean is not None
    assert layer.running_var is not None
    variance, mean = torch.var_mean(values, dim=dims)
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(variance)


def one_per_image(inputs: Tensor, images: int) -> Tensor:
    """Inputs of the last layer [B,D] in fp32; refused where they are not one per image."""
    if inputs.ndim != 2 or len(inputs) != images:
        raise NetworkError(f"The last layer read {tuple(inputs.shape)} for {images} images, not one per image.")
    return inputs.float()
