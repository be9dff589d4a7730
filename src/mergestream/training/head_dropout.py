"""Dropout before the head, while training only."""

from typing import Any

from torch import nn

from mergestream.networks.architecture import Network


class _Dropout:
    """Forward pre-hook that drops a share of the head's inputs."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return nn.functional.dropout(inputs[0], self.share, module.training), *inputs[1:]


def add_dropout(network: Network, share: float) -> None:
    """Add dropout before the head, unless an earlier fit of the same network already has."""
    head = network.module.get_submodule(network.head[0])
    present = any(isinstance(hook, _Dropout) and hook.share == share for hook in head._forward_pre_hooks.values())
    if share and not present:
        head.register_forward_pre_hook(_Dropout(share))
