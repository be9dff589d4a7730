"""GPU execution of steps: CUDA graphs, and networks and augmentations compiled once per process."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
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
    prepare = partial(augmentation.prepare_batch, strength, views, preprocessing)
    return torch.compile(lambda images, draws: prepare(images, draws), dynamic=False)


class CapturedStep:
    """A function of one tensor, recorded once as a CUDA graph and replayed with the tensor's next values."""

    def __init__(self, function: Callable[[Tensor], Tensor], example: Tensor) -> None:
        self._input, self._graph = example.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = function(self._input)

    def __call__(self, values: Tensor) -> Tensor:
        self._input.copy_(values)
        self._graph.replay()
        return self._result


@contextmanager
def preserved_state(module: nn.Module, optimiser: torch.optim.Optimizer) -> Iterator[None]:
    """A block after which weights and optimiser state have their old values again, in the same memory."""
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = {weight: {key: value.clone() for key, value in own.items()} for weight, own in optimiser.state.items()}
    try:
        yield
    finally:
        module.load_state_dict(weights)
        for parameter, values in optimiser.state.items():
            before = state.get(parameter, {})
            for key, value in values.items():
                value.copy_(before[key]) if key in before else value.zero_()
        optimiser.zero_grad()
