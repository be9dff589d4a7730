"""Networks and augmentations compiled once per process; later fits of the same architecture compile nothing."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mergestream.networks.architecture import Network
from mergestream.networks.preprocessing import Preprocessing
from mergestream.training import augmentation
from mergestream.training.recipe import Recipe

_networks: dict[str, nn.Module] = {}
_forwards: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()


def shared_network(network: Network, recipe: Recipe) -> Network:
    """Return this process's one network of the architecture, loaded with the given network's weights."""
    key = json.dumps([network.describe(), recipe.dropout, recipe.precision], sort_keys=True)
    module = _networks.setdefault(key, network.module)
    if module is not network.module:
        module.load_state_dict(network.module.state_dict())
    return replace(network, module=module)


def compiled_forward(module: nn.Module) -> Any:
    if module not in _forwards:
        _forwards[module] = torch.compile(module.forward, dynamic=False)
    return _forwards[module]


@lru_cache(maxsize=8)
def compiled_augmentation(
    strength: float, views: tuple[str, ...], preprocessing: Preprocessing
) -> Callable[[Tensor, Tensor], Tensor]:
    """Augmentation, normalisation and flips of a batch as a few kernels."""

    def prepare(images: Tensor, draws: Tensor) -> Tensor:
        return augmentation.prepare_batch(images, draws, strength, views, preprocessing)

    return torch.compile(prepare, dynamic=False)
