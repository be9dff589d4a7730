"""Test-time adaptation of the mean model: SGD on the affine parameters of its normalisation layers, and on no other."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.functional import scores as scoring
from mergestream.methods.base import option
from mergestream.methods.merged_model import MergedModel, MergedState
from mergestream.methods.state import INSEPARABLE, Step
from mergestream.networks.flat_layout import LayoutEntry
from mergestream.networks.layers import batch_statistics, batchnorm_layers, norm_parameters
from mergestream.pool.runner import Batch
from mergestream.pool.statistics.fisher_information import require_gradient
from mergestream.runtime.errors import NetworkError
from mergestream.runtime.option_checks import number, one_of, yes_or_no

OF_VIT, OF_BATCH_NORM = 1e-3, 2.5e-4  # published learning rates


@dataclass(frozen=True)
class AdaptedState(MergedState):
    change: Tensor = field(metadata=INSEPARABLE)  # of the adapted parameters from the mean's [N], fp32
    velocity: Tensor = field(metadata=INSEPARABLE)  # SGD's momentum [N]
    loss: Tensor = field(metadata=INSEPARABLE)  # moving average of the loss []; -1 before the first. Of SAR alone


@dataclass(kw_only=True, eq=False, repr=False)
class AdaptedNorms(MergedModel[AdaptedState]):
    """On every batch: one step of SGD by entropy, then the answer with the adapted weights."""

    needs: tuple[str, ...] = field(default=("gradients",), init=False)
    learns = True
    learning_rate: float | str = "published"  # 1e-3, or 2.5e-4 for networks with BatchNorm; or a number
    momentum: float = option(0.9, number, low=0, below=1)  # SGD's
    # BatchNorm layers normalise by each batch's own statistics, as published; else by the experts' mean statistics.
    recalibrate_bn: bool = option(True, yes_or_no)

    def __post_init__(self) -> None:
        super().__post_init__()
        module = self.pool.template.module
        if isinstance(self.learning_rate, str):
            one_of("learning_rate", self.learning_rate, ("published",))
            self._rate = OF_BATCH_NORM if batchnorm_layers(module) else OF_VIT
        else:
            self._rate = self.learning_rate = number("learning_rate", self.learning_rate, low=0)
        self._adapted = self._find_entries(norm_parameters(module))

    def frozen(self, names: Sequence[str]) -> set[str]:
        """Parameters among the names that are not adapted."""
        return set()

    def _find_entries(self, names: Sequence[str]) -> list[LayoutEntry]:
        adapted = set(names) - self.frozen(names)
        entries = [entry for entry in self.pool.layout.parameters if adapted & {entry.name, *entry.tied}]
        if not entries:
            raise NetworkError(
                f"'{self.name}' adapts the scales and shifts of normalisation layers, and "
                f"{self.pool.template.architecture} has none to adapt. Choose a method that adapts no weights."
            )
        return entries

    def start_learning(self) -> AdaptedState:
        size = sum(entry.stop - entry.start for entry in self._adapted)
        nothing = torch.zeros(size, device=self.pool.device)
        return AdaptedState(nothing, nothing, torch.full((), -1.0, device=self.pool.device))

    @abstractmethod
    def adapted(self, images: Tensor, state: AdaptedState) -> AdaptedState:
        """The state after one step of SGD on a prepared batch."""

    def advance(self, batch: Batch, state: AdaptedState) -> tuple[Step, AdaptedState]:
        images = scoring.require_finite(batch.images, "The input")
        module = self.pool.module_with(self.weights(state))
        with self.pool.input_errors(images), batch_statistics(module) if self.recalibrate_bn else nullcontext():
            state = self.adapted(images, state)
            return Step(self.pool.forward(self.weights(state), images)), state

    def descended(self, state: AdaptedState, gradient: Tensor) -> AdaptedState:
        """One step of SGD with momentum along a gradient [N]."""
        velocity = self.momentum * state.velocity + gradient
        return AdaptedState(state.change - self._rate * velocity, velocity, state.loss)

    def slope(self, images: Tensor, change: Tensor, *, below: float = math.inf, among: Tensor | None = None) -> Slope:
        """The mean entropy over images `among` [B] whose entropy is below a limit, where the mean is changed [N]."""
        with torch.inference_mode(False), torch.enable_grad():
            parameters = {name: values.clone().requires_grad_() for name, values in self._changed(change).items()}
            batch = images.clone() if images.is_inference() else images
            entropies = scoring.image_entropy(self.pool.logits_with(parameters, batch)[None])[0]
            require_gradient(entropies, f"'{self.name}'")
            counted = entropies.detach() < below
            counted = counted if among is None else counted & among
            loss = (entropies * counted).sum() / counted.sum().clamp_min(1)
            self.pool.passes["backward"] += len(batch)
            gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        return Slope(loss.detach(), torch.cat([each.flatten().float() for each in gradients]), counted)

    def _changed(self, change: Tensor) -> dict[str, Tensor]:
        """The adapted parameters by name, where the mean is changed by [N]."""
        pieces = change.split([entry.stop - entry.start for entry in self._adapted])
        means = [self._mean[entry.start : entry.stop] for entry in self._adapted]
        return {
            entry.name: (mean.float() + piece).to(mean.dtype).view(entry.shape)
            for entry, mean, piece in zip(self._adapted, means, pieces, strict=True)
        }

    @cached_property
    def _mean(self) -> Tensor:
        """The mean of the experts [P]."""
        return self.pool.merge(simplex.uniform(len(self.pool), self.pool.device), rows=self._rows)

    def merge_parameters(self, state: AdaptedState, out: Tensor) -> None:
        out.copy_(self._mean)
        for entry, values in zip(self._adapted, self._changed(state.change).values(), strict=True):
            out[entry.start : entry.stop] = values.flatten()

    def merged_from(self, state: AdaptedState) -> tuple[Tensor, ...]:
        return (state.change,)


@dataclass(frozen=True)
class Slope:
    """A loss [], its gradient by the adapted parameters [N], and the images that count in it [B]."""

    loss: Tensor
    gradient: Tensor
    counted: Tensor
