"""BatchNorm statistics of a merged model from a window of the stream in which every class has its own sums."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mergestream.functional import class_mix, class_windows
from mergestream.methods.card_values import resolve_home
from mergestream.methods.state import OF_ALL_EXPERTS, State
from mergestream.networks.layers import BatchNorm, batchnorm_layers, with_inputs
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import InputError

WINDOW = "window"
LEAST_VARIANCE = 1e-12  # of a channel that is constant in all experts


def batchnorm_choice(name: str, value: bool | str) -> bool | str:
    """Accept False (the merged averages), True (each batch's own statistics) or 'window'."""
    if isinstance(value, bool) or value == WINDOW:
        return value
    raise InputError(f"The option '{name}' is true, false or '{WINDOW}'; got {value!r}.")


@dataclass(frozen=True)
class WindowState(State):
    """Sums over images that fade, of layer inputs in units of the merged statistics.

    T are the channels of all BatchNorm layers together.
    """

    images: Tensor = field(metadata=OF_ALL_EXPERTS)  # of every class [C]
    mix: Tensor = field(metadata=OF_ALL_EXPERTS)  # mean answers, summed over batches [C]
    means: Tensor = field(metadata=OF_ALL_EXPERTS)  # [C,T]
    squares: Tensor = field(metadata=OF_ALL_EXPERTS)  # [C,T]


@dataclass
class MeasuredForward:
    """A forward pass inside `BatchNormWindow.measuring`: the state before it, and then the one after it."""

    state: WindowState


@dataclass(frozen=True)
class BatchNormWindow:
    """The unit's functions. `home` [C] is the mix of classes before a stream.

    Layer inputs are counted in units of the merged statistics, of which they would have the mean 0 and the square 1:
    so the window holds while coefficients move, and without a stream the merged statistics remain.
    """

    pool: ExpertPool
    home: Tensor  # [C]
    class_images: float = 4.0  # so many images of a class count as much as what other classes say of it
    start_classes: float = 2.0  # so many classes the merged statistics count
    home_batches: float = 16.0  # so many batches the mix at home counts
    memory: float = 128.0  # over so many of its images a class fades to 1/e
    mix_memory: float = 4096.0  # over so many images the mix fades to 1/e

    @classmethod
    def of(cls, pool: ExpertPool, choice: bool | str) -> "BatchNormWindow | None":
        """The window that an option asks for; None if it asks for another rule."""
        return cls(pool, class_mix.as_mix(resolve_home("card", pool)).to(pool.device)) if choice == WINDOW else None

    def start(self) -> WindowState:
        channels = sum(layer.num_features for layer in batchnorm_layers(self.pool.template.module))
        classes = torch.zeros_like(self.home)
        sums = classes[:, None].repeat(1, channels)
        return WindowState(classes, classes, sums, sums)

    def card_values(self) -> dict[str, Any]:
        return {"batchnorm_mix": self.home.tolist()}

    def write(self, state: WindowState, weights: Tensor) -> None:
        """Put a state's statistics into weights [P] that hold the merged ones."""
        layers = batchnorm_layers(self.pool.module_with(weights))
        for layer, means, squares in zip(layers, *_by_layer(state, layers), strict=True):
            self._write(state, layer, merged_statistics(layer), means, squares)

    def answer(
        self, batch: Batch, state: WindowState, weights: Tensor, experts: Tensor | None
    ) -> tuple[Tensor, WindowState]:
        """Logits [B,C] of weights [P] that hold the merged statistics, with the window's after this batch.

        The classes of this batch come from the experts' logits [K,B,C] if they were asked, otherwise from the model
        with the statistics before this batch: one more forward.
        """
        with self.measuring(batch, state, weights, experts) as measured:
            logits = self.pool.forward(weights, batch.images)
        return logits, measured.state

    @contextmanager
    def measuring(
        self, batch: Batch, state: WindowState, weights: Tensor, experts: Tensor | None
    ) -> Iterator[MeasuredForward]:
        """Measure a forward pass inside the block; every layer gets its new statistics before it runs."""
        layers = batchnorm_layers(self.pool.module_with(weights))
        measured = MeasuredForward(state)
        if not layers:
            yield measured
            return
        merged = [merged_statistics(layer) for layer in layers]
        if experts is None:
            self.write(state, weights)
            answers = torch.softmax(self.pool.forward(weights, batch.images), dim=-1)
        else:
            answers = torch.softmax(experts.float(), dim=-1).mean(dim=0)
        of_class = class_windows.weights_of_classes(answers, class_mix.counted(batch.shares, batch.images))
        faded, counted = self._counted(state, of_class)
        before = list(zip(*_by_layer(state, layers), strict=True))
        after = before.copy()

        def receive(place: int, layer: BatchNorm, values: Tensor) -> None:
            per_image = _standardised(values, merged[place], len(of_class))
            sums = zip(before[place], per_image, strict=True)
            means, squares = (class_windows.add(old, faded, new, of_class) for old, new in sums)
            self._write(counted, layer, merged[place], means, squares)
            after[place] = means, squares

        with with_inputs(layers, receive):
            yield measured
        means, squares = (torch.cat(parts, dim=1) for parts in zip(*after, strict=True))
        measured.state = WindowState(counted.images, counted.mix, means, squares)

    def _counted(self, state: WindowState, of_class: Tensor) -> tuple[Tensor, WindowState]:
        """What is left of every class's older sums [C], and the state with this batch's images counted."""
        new = of_class.sum(dim=0)
        total = new.sum()
        faded = torch.exp(-new / self.memory)
        mix = torch.exp(-total / self.mix_memory) * state.mix + new / total
        return faded, WindowState(faded * state.images + new, mix, state.means, state.squares)

    def _write(
        self, state: WindowState, layer: BatchNorm, merged: tuple[Tensor, Tensor], means: Tensor, squares: Tensor
    ) -> None:
        """Put the statistics of one layer into it: merged ones [c] each, and its sums [C,c]."""
        mix = state.mix + self.home_batches * self.home
        mean, square = (
            class_windows.mean_over_classes(
                sums, state.images, mix, start, class_images=self.class_images, start_classes=self.start_classes
            )
            for sums, start in ((means, 0.0), (squares, 1.0))
        )
        centre, variance = merged
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.copy_(centre + variance.sqrt() * mean)
        layer.running_var.copy_(variance * (square - mean.square()).clamp_min(0))


def merged_statistics(layer: BatchNorm) -> tuple[Tensor, Tensor]:
    """Mean and variance [c] of a layer in fp32: copies."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean.float().clone(), layer.running_var.float().clone().clamp_min(LEAST_VARIANCE)


def _by_layer(state: WindowState, layers: Sequence[BatchNorm]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Each layer's part of a state's sums of means and of squares, [C,c] each."""
    sizes = [layer.num_features for layer in layers]
    return state.means.split(sizes, dim=1), state.squares.split(sizes, dim=1)


def _standardised(values: Tensor, merged: tuple[Tensor, Tensor], images: int) -> tuple[Tensor, Tensor]:
    """Every image's mean [B,c] and mean square [B,c] of a layer's inputs, in units of the merged statistics."""
    centre, variance = merged
    shape = (1, -1, *(1 for _ in values.shape[2:]))
    standardised = (values.float() - centre.view(shape)) / variance.sqrt().view(shape)
    if len(values) != images:  # rows are not images: each image gets the mean of all
        standardised = standardised.movedim(1, 0).flatten(1)[None].expand(images, -1, -1)
    flat = standardised.flatten(2) if standardised.ndim > 2 else standardised[..., None]
    return flat.mean(dim=-1), flat.square().mean(dim=-1)
