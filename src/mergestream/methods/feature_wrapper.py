"""Wrappers that also use features: the inputs of the last linear layer of the network behind the answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.methods.state import State, Step
from mergestream.methods.wrapper import W, Wrapper
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import NetworkError


@dataclass(kw_only=True, eq=False, repr=False)
class FeatureWrapper(Wrapper[W]):
    """Features are those of the merged model, or of the experts' mean where the base has no merged model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        layer, network = self.pool.last_layer, self.pool.template.architecture
        if layer is None:
            raise NetworkError(
                f"'{self.name}' uses the features that the last layer reads, and {network} does not end in one linear "
                f"layer with a bias."
            )
        self._last_layer = layer

    def answered(self, batch: Batch, state: W) -> tuple[Step, State, Tensor]:
        """The base's step and next state, and features [B,D]: of its own forward where it has one."""
        with self.pool.merged_inputs(batch) as inputs:
            step, base = self._base.advance(batch, state.base)
        if inputs:
            return step, base, inputs[-1]
        weights = self._base.weights(base)
        features = self.pool.forward_with_inputs(self._mean if weights is None else weights, batch.images)[1]
        return step, base, features

    def last_layer_of(self, base: State) -> tuple[Tensor, Tensor]:
        """Weight [C,D] and bias [C] of the network whose features are used, in a state of the base."""
        weights = self._base.weights(base)
        return self._last_layer.of_weights(self._mean if weights is None else weights)

    @cached_property
    def _mean(self) -> Tensor:
        """The mean of the experts' weights [P]."""
        with torch.no_grad():
            return self.pool.merge(simplex.uniform(len(self.pool), self.pool.device))
