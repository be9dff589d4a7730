"""BatchNorm statistics of a merged network, re-estimated from a batch: averaged ones do not fit it."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def reestimate(module: nn.Module, batch: Tensor) -> bool:
    """Overwrite every layer's running mean and variance with those of batch [B,c,H,W], in one forward pass.

    A layer that sees a single value per channel cannot estimate a variance; its statistics are unchanged. Returns
    whether the network has such layers, and so ran.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]
    handles = [layer.register_forward_pre_hook(_measure) for layer in layers]
    try:
        if layers:
            module(batch)
    finally:
        for handle in handles:
            handle.remove()
    return bool(layers)


def _measure(layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
    values = inputs[0].float()
    dims = [dim for dim in range(values.ndim) if dim != 1]
    if values.numel() // values.shape[1] < 2:
        return
    assert layer.running_mean is not None
    assert layer.running_var is not None
    variance, mean = torch.var_mean(values, dim=dims)
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(variance)
