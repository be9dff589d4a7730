"""The steps of a fit: eager anywhere; on a CUDA device one captured graph, compiled first where that pays."""

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from mergestream.networks.architecture import Network, logits_of
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.execution import warm_up
from mergestream.runtime.errors import InputError
from mergestream.runtime.messages import log_once
from mergestream.training import augmentation
from mergestream.training.heads import add_dropout
from mergestream.training.recipe import Recipe

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
EAGER, GRAPH, COMPILED = "eager", "graph", "compiled graph"
# A shorter fit ends before its compilation has paid for itself (benchmarks/train_speed.py).
COMPILE_PAYS_FROM = 3000
_log = logging.getLogger(__name__)
_networks: dict[str, nn.Module] = {}


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
        device, self._preprocessing = images.device, network.require_preprocessing()
        self._recipe, self._device = recipe, device
        self._images, self._labels, self._class_weights = images, labels, class_weights
        self._batches = batches.to(device)
        add_dropout(network, recipe.dropout)
        self.module = network.module
        self.optimiser = create_optimiser(self.module, recipe, device)
        self.schedule: OneCycleLR | None = None  # the one schedule with a state; `set_rate` computes the others
        if recipe.schedule == "one_cycle":
            rate, steps = recipe.learning_rate, recipe.steps
            self.schedule = OneCycleLR(self.optimiser, max_lr=rate, total_steps=steps, pct_start=0.1)
        # The loss scale that float16 gradients need; at other precisions it passes everything through.
        self._scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "16-mixed")
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
        recipe = self._recipe
        settings = recipe.augmentation, recipe.views, self._preprocessing
        prepare: Any = partial(augmentation.prepare_batch, *settings)
        forward: Any = self.module
        if compiled:
            prepare, forward = compiled_augmentation(*settings), compiled_forward(self.module)

        def learn(indices: Tensor) -> Tensor:
            draws = augmentation.draw(len(indices), recipe.augmentation, recipe.views, indices.device)
            inputs = prepare(self._images[indices], draws)
            with autocast(recipe, self._device):
                logits = logits_of(forward(inputs)).float()
            labels, smoothing = self._labels[indices], recipe.label_smoothing
            loss = nn.functional.cross_entropy(logits, labels, self._class_weights, label_smoothing=smoothing)
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
                with preserved_state(self.module, self.optimiser):
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
    possible = device.type == "cuda" and recipe.schedule != "one_cycle" and recipe.precision != "16-mixed"
    if recipe.compile == "always" and not possible:
        raise InputError(
            "compile='always' needs a CUDA device, precision 32-true or bf16-mixed, and another schedule than "
            "one_cycle; 'auto' compiles where that is so."
        )
    if not possible or recipe.compile == "never":
        return EAGER
    return COMPILED if recipe.compile == "always" or recipe.steps >= COMPILE_PAYS_FROM else GRAPH


def choose_device(recipe: Recipe) -> torch.device:
    """Return the recipe's device; 'auto' takes a CUDA device if there is one."""
    available = torch.cuda.is_available()
    if recipe.accelerator == "cuda" and not available:
        raise InputError("The recipe needs a CUDA device, and this machine has none.")
    device = torch.device("cuda" if available and recipe.accelerator != "cpu" else "cpu")
    if recipe.precision == "16-mixed" and device.type == "cpu":
        raise InputError("precision='16-mixed' needs a CUDA device; on a CPU use 32-true or bf16-mixed.")
    return device


def autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager[object]:
    """Return the block in which forward passes run: weights stay float32, mixed precision casts what gains from it."""
    dtype = AUTOCAST.get(recipe.precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def create_optimiser(module: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    if device.type == "cuda":
        options["fused"] = True  # one kernel for all weights
        if recipe.schedule != "one_cycle":  # a captured step reads the rate from the device
            options["lr"] = torch.tensor(recipe.learning_rate, device=device)
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, **options)
    kind = torch.optim.Adam if recipe.optimiser == "adam" else torch.optim.AdamW
    return kind(parameters, capturable=device.type == "cuda", **options)


def set_rate(optimiser: torch.optim.Optimizer, recipe: Recipe, step: int) -> None:
    """Set the learning rate of a step (from 1): constant, or a linear warm-up, then half a cosine down to 0."""
    if recipe.schedule != "cosine":
        return
    warm = max(1, recipe.steps // 10)
    progress = (step - warm) / max(1, recipe.steps - warm)
    share = step / warm if step <= warm else 0.5 * (1 + math.cos(math.pi * progress))
    rate = recipe.learning_rate * share
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def shared_network(network: Network, recipe: Recipe) -> Network:
    """Return this process's one network of the architecture, loaded with the given network's weights."""
    key = json.dumps([network.describe(), recipe.dropout, recipe.precision], sort_keys=True)
    module = _networks.setdefault(key, network.module)
    if module is not network.module:
        module.load_state_dict(network.module.state_dict())
    return replace(network, module=module)


@cache
def compiled_forward(module: nn.Module) -> Any:
    return torch.compile(module.forward, dynamic=False)


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
