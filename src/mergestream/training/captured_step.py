"""A training step as one CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


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


class PreservedState:
    """A block after which weights and optimiser state have their old values again, in the same memory."""

    def __init__(self, module: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        self._module, self._optimiser = module, optimiser

    def __enter__(self) -> None:
        self._weights = {name: tensor.clone() for name, tensor in self._module.state_dict().items()}
        self._state = {
            parameter: {key: value.clone() for key, value in values.items()}
            for parameter, values in self._optimiser.state.items()
        }

    def __exit__(self, *_: object) -> None:
        self._module.load_state_dict(self._weights)
        for parameter, values in self._optimiser.state.items():
            before = self._state.get(parameter, {})
            for key, value in values.items():
                value.copy_(before[key]) if key in before else value.zero_()
        self._optimiser.zero_grad()
