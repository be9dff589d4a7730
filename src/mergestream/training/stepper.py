"""The steps of a fit: eager anywhere; on a CUDA device one captured graph, compiled first where that pays."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.networks.architecture import Network, logits_of
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.execution import warm_up
from mergestream.runtime.errors import InputError
from mergestream.runtime.log_once import log_once
from mergestream.training import augmentation
from mergestream.training.gpu_execution import CapturedStep, PreservedState, compiled_augmentation, compiled_forward
from mergestream.training.heads import add_dropout
from mergestream.training.optimisation import autocast, create_optimiser, create_scaler, create_schedule, set_rate
from mergestream.training.recipe import Recipe

EAGER, GRAPH, COMPILED = "eager", "graph", "compiled graph"
# A shorter fit ends before its compilation has paid for itself (benchmarks/train_speed.py).
COMPILE_PAYS_FROM = 3000
_log = logging.getLogger(__name__)


class Stepper:
    """Optimisation steps of a network on its device; `execution` says whether eager, graph or compiled graph."""

    def __init__(
        self,
        network: Network,
        images: Tensor,
        labels: Tensor,
        batches: Tensor,
        recipe: Recipe,
        class_weights: Tensor | None = None,
    ) -> None:
        """`images` uint8 [N,3,H,W] of the network's size, `labels` [N], `batches` [steps,B] of indices into them."""
        assert network.preprocessing is not None
        device = images.device
        self._preprocessing: Preprocessing = network.preprocessing
        self._recipe, self._device = recipe, device
        self._images, self._labels, self._class_weights = images, labels, class_weights
        self._batches = batches.to(device)
        add_dropout(network, recipe.dropout)
        self.module = network.module
        self.optimiser = create_optimiser(self.module, recipe, device)
        self.schedule = create_schedule(self.optimiser, recipe)
        self._scaler = create_scaler(recipe, device)
        self.execution = choose_execution(recipe, device)
        self.loss = torch.zeros((), device=device)
        self._eager = self._create_step(compiled=False)
        self._captured: CapturedStep | None = None

    def take(self, step: int) -> None:
        """Take step number `step` (from 1). Each step has its own seed, so that resuming needs no generator state."""
        indices = self._batches[step - 1]
        if self.execution != EAGER and self._captured is None:
            self._capture(indices)
        set_rate(self.optimiser, self._recipe, step)
        torch.manual_seed(self._recipe.seed * 1_000_003 + step)
        self.loss = (self._captured or self._eager)(indices)
        if self.schedule is not None:
            self.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        schedule = None if self.schedule is None else self.schedule.state_dict()
        return {"optimiser": self.optimiser.state_dict(), "schedule": schedule}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the optimiser and the schedule, before the first step."""
        rates = [group["lr"] for group in self.optimiser.param_groups]
        self.optimiser.load_state_dict(state["optimiser"])
        for group, rate in zip(self.optimiser.param_groups, rates, strict=True):
            if isinstance(rate, Tensor):  # a captured step reads this very tensor, not the one just loaded
                group["lr"] = rate.fill_(float(group["lr"]))
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])

    def _create_step(self, *, compiled: bool) -> Callable[[Tensor], Tensor]:
        """Create the step as a function of the batch's indices [B] that returns the loss."""
        recipe, preprocessing = self._recipe, self._preprocessing
        settings: dict[str, Any] = {
            "strength": recipe.augmentation,
            "views": recipe.views,
            "preprocessing": preprocessing,
        }
        prepare: Any = partial(augmentation.prepare_batch, **settings)
        forward: Any = self.module
        if compiled:
            prepare, forward = compiled_augmentation(**settings), compiled_forward(self.module)

        def learn(indices: Tensor) -> Tensor:
            draws = augmentation.draw(len(indices), recipe.augmentation, recipe.views, indices.device)
            inputs = prepare(self._images[indices], draws)
            with autocast(recipe, self._device):
                logits = logits_of(forward(inputs)).float()
            loss = nn.functional.cross_entropy(
                logits,
                self._labels[indices],
                weight=self._class_weights,
                label_smoothing=recipe.label_smoothing,
            )
            self.optimiser.zero_grad()
            self._scaler.scale(loss).backward()
            self._scaler.step(self.optimiser)
            self._scaler.update()
            return loss.detach()

        return learn

    def _capture(self, indices: Tensor) -> None:
        """Record the step; if it cannot be compiled or captured, fall back to the simpler way and log that once."""
        for execution in (COMPILED, GRAPH) if self.execution == COMPILED else (GRAPH,):
            try:
                with PreservedState(self.module, self.optimiser):
                    function = self._create_step(compiled=execution == COMPILED)
                    warm_up(partial(function, indices))
                self._captured, self.execution = CapturedStep(function, indices), execution
                return
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                log_once(_log, logging.WARNING, f"The step cannot run as a {execution} ({reason}); using another way.")
        self.execution = EAGER


def choose_execution(recipe: Recipe, device: torch.device) -> str:
    """Eager, graph or compiled graph. A graph fixes its numbers: one_cycle's rate and a loss scale need eager steps."""
    possible = (
        device.type == "cuda" and recipe.schedule != "one_cycle" and recipe.precision in ("32-true", "bf16-mixed")
    )
    if recipe.compile == "always" and not possible:
        raise InputError(
            "compile='always' needs a CUDA device, precision 32-true or bf16-mixed, and another schedule than "
            "one_cycle; 'auto' compiles where that is so."
        )
    if not possible or recipe.compile == "never":
        return EAGER
    return COMPILED if recipe.compile == "always" or recipe.steps >= COMPILE_PAYS_FROM else GRAPH
