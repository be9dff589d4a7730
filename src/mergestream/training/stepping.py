"""The steps of a fit: eager anywhere, on a CUDA device one captured graph, compiled first where that pays."""

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
from mergestream.runtime.log_once import tell_once
from mergestream.training import augmentation
from mergestream.training.compiling import compiled_changes, compiled_forward
from mergestream.training.optimisers import add_dropout, create_optimiser, create_schedule, set_rate
from mergestream.training.recipe import Recipe

EAGER, GRAPH, COMPILED = "eager", "graph", "compiled graph"
# A fit of fewer steps is over before a compilation has paid for itself (benchmarks/train_speed.py).
COMPILE_PAYS_FROM = 3000
Prepare = Callable[[Tensor, Tensor], Tensor]  # uint8 images and draws -> what the network takes
_log = logging.getLogger(__name__)


class Stepper:
    """Steps over images that lie on the device already; `how` says in which of the three ways they are taken."""

    def __init__(
        self,
        fabric: Any,
        network: Network,
        images: Tensor,
        labels: Tensor,
        batches: Tensor,
        recipe: Recipe,
        class_weights: Tensor | None = None,
    ) -> None:
        """`images` [N,3,H,W] of the network's size as uint8, `labels` [N], `batches` [steps,B] of places in them."""
        assert network.preprocessing is not None
        self._preprocessing: Preprocessing = network.preprocessing
        self._fabric, self._recipe = fabric, recipe
        self._images, self._labels, self._class_weights = images, labels, class_weights
        self._batches = batches.to(images.device)
        add_dropout(network, recipe.dropout)
        self._plain = network.module
        self._raw_optimiser = create_optimiser(network.module, recipe, images.device)
        self._module, self.optimiser = fabric.setup(network.module, self._raw_optimiser)
        self.schedule = create_schedule(self.optimiser, recipe)
        self.how = how_to_step(recipe, images.device)
        self.loss = torch.zeros((), device=images.device)
        self._eager = self._learner(self._change, self._module, self.optimiser, fabric.backward)
        self._captured: _Captured | None = None

    def take(self, step: int) -> None:
        """Step number `step`, from 1; its randomness has its own seed, so that resuming needs no generator's state."""
        picked = self._batches[step - 1]
        if self.how != EAGER and self._captured is None:
            self._capture(picked)
        set_rate(self._raw_optimiser, self._recipe, step)
        torch.manual_seed(self._recipe.seed * 1_000_003 + step)
        self.loss = (self._captured or self._eager)(picked)
        if self.schedule is not None:
            self.schedule.step()

    def restore(self, optimiser: dict[str, Any], schedule: dict[str, Any] | None) -> None:
        """Take up states that were written down, before the first step."""
        rates = [group["lr"] for group in self._raw_optimiser.param_groups]
        self._raw_optimiser.load_state_dict(optimiser)
        for group, rate in zip(self._raw_optimiser.param_groups, rates, strict=True):
            if isinstance(rate, Tensor):  # where it was, which is not where it was read to
                group["lr"] = rate.fill_(float(group["lr"]))
        if self.schedule is not None and schedule is not None:
            self.schedule.load_state_dict(schedule)

    def _learner(self, prepare: Prepare, forward: Any, optimiser: Any, backward: Any) -> Callable[[Tensor], Tensor]:
        """The step as a function of the batch's places [B]; eager, captured and compiled differ in what is given."""
        recipe, fabric = self._recipe, self._fabric
        # Every device prepares the same batch and learns from its part, so that their number changes no draw.
        mine = slice(fabric.global_rank, None, fabric.world_size)

        def learn(picked: Tensor) -> Tensor:
            draws = augmentation.draw(len(picked), recipe.augmentation, recipe.views, picked.device)
            inputs = prepare(self._images[picked], draws)
            loss = self._loss(logits_of(forward(inputs[mine])).float(), self._labels[picked], mine)
            optimiser.zero_grad()
            backward(loss)
            optimiser.step()
            return loss.detach()

        return learn

    def _unwrapped(self, *, compiled: bool) -> Callable[[Tensor], Tensor]:
        """Without Fabric's wrappers, which neither a compiler nor a graph needs."""
        recipe = self._recipe
        prepare = compiled_changes(recipe.augmentation, recipe.views, self._preprocessing) if compiled else self._change
        network = compiled_forward(self._plain) if compiled else self._plain

        def forward(inputs: Tensor) -> Any:
            with self._fabric.autocast():
                return network(inputs)

        return self._learner(prepare, forward, self._raw_optimiser, Tensor.backward)

    def _change(self, images: Tensor, draws: Tensor) -> Tensor:
        recipe = self._recipe
        return augmentation.changed(images, draws, recipe.augmentation, recipe.views, self._preprocessing)

    def _loss(self, logits: Tensor, labels: Tensor, mine: slice) -> Tensor:
        smoothing, weights = self._recipe.label_smoothing, self._class_weights
        if self._fabric.world_size == 1:
            return nn.functional.cross_entropy(logits, labels, weight=weights, label_smoothing=smoothing)
        # Devices average their gradients: each divides by the whole batch's weight and counts for all of them.
        total = len(labels) if weights is None else weights[labels].sum()
        part = nn.functional.cross_entropy(
            logits, labels[mine], weight=weights, label_smoothing=smoothing, reduction="sum"
        )
        return part * self._fabric.world_size / total

    # --- one graph ----------------------------------------------------------------------------------------

    def _capture(self, picked: Tensor) -> None:
        """Record the step; what cannot be compiled or captured is stepped in the plainer way, and told once."""
        ways = [COMPILED, GRAPH] if self.how == COMPILED else [GRAPH]
        for way in ways:
            try:
                with _Untouched(self._plain, self._raw_optimiser):
                    function = self._unwrapped(compiled=way == COMPILED)
                    warm_up(partial(function, picked))
                self._captured, self.how = _Captured(function, picked), way
                return
            except Exception as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                tell_once(_log, logging.WARNING, f"The step cannot be taken as a {way} ({why}); going on without.")
        self.how = EAGER


class _Captured:
    """A function of one tensor as a CUDA graph: recorded once, replayed with the tensor's next values."""

    def __init__(self, function: Any, example: Tensor) -> None:
        self._given, self._graph = example.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = function(self._given)

    def __call__(self, given: Tensor) -> Tensor:
        self._given.copy_(given)
        self._graph.replay()
        return self._result  # type: ignore[no-any-return]


class _Untouched:
    """A block after which weights and the optimiser's state are what they were, in the same places."""

    def __init__(self, module: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        self._module, self._optimiser = module, optimiser

    def __enter__(self) -> None:
        self._weights = {name: tensor.clone() for name, tensor in self._module.state_dict().items()}
        self._state = {
            parameter: {key: value.clone() for key, value in kept.items()}
            for parameter, kept in self._optimiser.state.items()
        }

    def __exit__(self, *_: object) -> None:
        self._module.load_state_dict(self._weights)
        for parameter, kept in self._optimiser.state.items():
            before = self._state.get(parameter, {})
            for key, value in kept.items():
                value.copy_(before[key]) if key in before else value.zero_()
        self._optimiser.zero_grad()


def how_to_step(recipe: Recipe, device: torch.device) -> str:
    """Eager, graph or compiled graph. A graph holds its numbers: what one_cycle or a loss scale changes is eager."""
    possible = (
        device.type == "cuda"
        and recipe.devices == 1
        and recipe.schedule != "one_cycle"
        and recipe.precision in ("32-true", "bf16-mixed")
    )
    if recipe.compile == "always" and not possible:
        raise InputError(
            "compile='always' needs one CUDA device, precision 32-true or bf16-mixed, and another schedule than "
            "one_cycle; 'auto' compiles where that is so."
        )
    if not possible or recipe.compile == "never":
        return EAGER
    return COMPILED if recipe.compile == "always" or recipe.steps >= COMPILE_PAYS_FROM else GRAPH
