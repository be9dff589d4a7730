"""The training loop: steps, looks at the validation split, the best step kept, resumable at any moment."""

import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.data.datasets.base import DomainData
from mergestream.functional.metrics import risk_by_confidence, summarise
from mergestream.networks.architecture import Network, logits_of
from mergestream.networks.preprocessing import resize
from mergestream.runtime.errors import CheckpointError, NetworkError, TrainingError
from mergestream.runtime.seeding import cpu_threads, seeded
from mergestream.runtime.state_file import read_state, write_state
from mergestream.training.compiling import standing_for
from mergestream.training.devices import create_fabric, without_advice
from mergestream.training.losses import balanced, class_weights
from mergestream.training.recipe import Recipe
from mergestream.training.splitting import split
from mergestream.training.stepping import COMPILED, Stepper, how_to_step
from mergestream.training.temperature import fit_temperature

OnStep = Callable[[], None]
OnLook = Callable[[dict[str, float]], None]
CHUNK = 256  # images of one validation forward


def ignore(*_: object) -> None:
    """What is called where nobody listens; a function with a name, since other processes must find it."""


@dataclass(frozen=True)
class Fit:
    """The weights of the best step, how they did on the validation split, and the losses over time."""

    state: dict[str, Tensor]
    step: int
    metrics: dict[str, Any]
    temperature: float
    history: list[dict[str, float]]
    how: str  # eager, graph or compiled graph
    criterion: float  # the value that chose the step


@dataclass(frozen=True)
class Keeping:
    """Where a fit that may be killed is written down, and how many seconds of work a kill may cost at most.

    It is written at a look at the validation split; with 0 seconds at each.
    """

    path: Path
    seconds: float = 0.0


@dataclass(frozen=True)
class Listeners:
    """Who is told of a step, and of a look at the validation split."""

    step: OnStep = ignore
    look: OnLook = ignore


def fit(
    network: Network,
    data: DomainData,
    recipe: Recipe,
    on_step: OnStep = ignore,
    *,
    on_look: OnLook = ignore,
    keeping: Keeping | None = None,
) -> Fit:
    """Minimise the recipe's loss on the training split; keep the step that the criterion likes best on the validation
    split, seen without augmentation. With `keeping` a killed fit goes on from where it was last written down.
    """
    if network.preprocessing is None:
        raise NetworkError("Training needs to know the network's preprocessing; give preprocessing=.")
    listeners = Listeners(on_step, on_look)
    with without_advice():
        fabric = create_fabric(recipe)
        if recipe.devices == 1:
            return _fit(fabric, network, data, recipe, listeners, keeping)
        told = fabric.launch(_Apart(network, data, recipe, listeners, keeping))
    return Fit(**{**told, "state": {name: torch.from_numpy(array) for name, array in told["state"].items()}})


def _fit(
    fabric: Any, network: Network, data: DomainData, recipe: Recipe, listeners: Listeners, keeping: Keeping | None
) -> Fit:
    """The whole fit, in every process that takes part; the first one speaks and writes."""
    if fabric.global_rank > 0:
        listeners = Listeners()
    with seeded(recipe.seed), cpu_threads(recipe.threads):
        fitting = _Fitting(fabric, network, data, recipe, keeping)
        for line in fitting.history:
            listeners.look(line)
        for step in range(fitting.step + 1, recipe.steps + 1):
            fitting.stepper.take(step)
            listeners.step()
            if step % recipe.validate_every == 0 or step == recipe.steps:
                listeners.look(fitting.look(step))
        return fitting.finish()


class _Apart:
    """A fit for Fabric's own processes, which take and return no frozen dataclass, and no tensor that outlives them."""

    def __init__(self, network: Network, *more: Any) -> None:
        self._network, self._more = network, more

    def __call__(self, fabric: Any) -> dict[str, Any]:
        # Weights that travelled to several processes of one machine lie in memory that they share.
        own = replace(self._network, module=deepcopy(self._network.module))
        fitted = _fit(fabric, own, *self._more)
        return {**vars(fitted), "state": {name: tensor.numpy() for name, tensor in fitted.state.items()}}


class _Fitting:
    """A fit under way: what a checkpoint must hold is in `_kept`."""

    def __init__(
        self, fabric: Any, network: Network, data: DomainData, recipe: Recipe, keeping: Keeping | None
    ) -> None:
        if how_to_step(recipe, fabric.device) == COMPILED:
            network = standing_for(network, recipe)
        self._recipe, self._data, self._keeping, self._network, self._fabric = recipe, data, keeping, network, fabric
        assert network.preprocessing is not None
        self._prepare = network.preprocessing
        training, self._validation = split(len(data), recipe.validation_share, recipe.splits_by, data.groups)
        self._images = resize(data.images, self._prepare.size, self._prepare.interpolation).to(fabric.device)
        self._labels = data.labels.to(fabric.device)
        weights = class_weights(data, training).to(fabric.device) if recipe.loss == "weighted" else None
        batches = _batches(training, recipe)
        self.stepper = Stepper(fabric, network, self._images, self._labels, batches, recipe, weights)
        self._best: dict[str, Any] = {"value": math.inf, "step": 0, "state": {}}
        self.history: list[dict[str, float]] = []
        self.step = 0
        self._train()
        self._restore()
        self._written = time.monotonic()

    def look(self, step: int) -> dict[str, float]:
        """How the weights do on the validation split now; the best ones so far are kept, and the state written."""
        logits, labels = self._predict(), self._labels[self._validation.to(self._labels.device)]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        plain = float(losses.mean())
        if not math.isfinite(plain):
            raise TrainingError(f"The loss on '{self._data.name}' became {plain} by step {step}: lower learning_rate.")
        right = float((logits.argmax(dim=-1) == labels).float().mean())
        line = {"step": step, "training_loss": float(self.stepper.loss), "validation_loss": plain}
        self.history.append({**line, "validation_accuracy": right})
        value = plain if self._recipe.criterion == "plain" else balanced(losses, labels)
        if value < self._best["value"]:
            self._best = {"value": value, "step": step, "state": _snapshot(self._network.module)}
        self.step = step
        self._write()
        return self.history[-1]

    def finish(self) -> Fit:
        best = self._best
        self._network.module.load_state_dict(best["state"])
        logits = self._predict().cpu()
        labels = self._data.labels[self._validation]
        probabilities = torch.softmax(logits, dim=-1)
        metrics = summarise(probabilities, labels, self._data.classes)
        metrics["risk_by_confidence"] = risk_by_confidence(probabilities, labels)
        said = probabilities.mean(dim=0).tolist()
        metrics["mean_probability"] = dict(zip(self._data.classes, said, strict=True))
        temperature = fit_temperature(logits, labels)
        if self._keeping is not None and self._fabric.global_rank == 0:
            self._keeping.path.unlink(missing_ok=True)
        return Fit(best["state"], best["step"], metrics, temperature, self.history, self.stepper.how, best["value"])

    @torch.no_grad()
    def _predict(self) -> Tensor:
        """Logits of the validation split, by the network itself: a compiled one would compile anew for its shapes."""
        module = self._network.module.eval()
        found = []
        with self._fabric.autocast():
            for places in self._validation.to(self._images.device).split(CHUNK):
                pixels = self._images[places].to(torch.float32) / 255
                found.append(logits_of(module(self._prepare.normalised(pixels))).float())
        self._train()
        return torch.cat(found)

    def _train(self) -> None:
        self._network.module.train()
        if self._recipe.freeze_bn:
            for module in self._network.module.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    def _write(self) -> None:
        keeping = self._keeping
        if keeping is None or self._fabric.global_rank > 0 or self.step == self._recipe.steps:
            return
        if time.monotonic() - self._written >= keeping.seconds:
            write_state(keeping.path, self._kept())
            self._written = time.monotonic()

    def _kept(self) -> dict[str, Any]:
        schedule = self.stepper.schedule
        return {
            "step": self.step,
            "module": self._network.module.state_dict(),
            "optimiser": self.stepper.optimiser.state_dict(),
            "schedule": None if schedule is None else schedule.state_dict(),
            "best": self._best,
            "history": self.history,
        }

    def _restore(self) -> None:
        """Take up what was written; from nothing, or from what is not sound, the fit begins anew."""
        if self._keeping is None or not self._keeping.path.exists():
            return
        try:
            kept = read_state(self._keeping.path)
        except CheckpointError:
            return
        self._network.module.load_state_dict(kept["module"])
        self.stepper.restore(kept["optimiser"], kept["schedule"])
        self.step, self._best, self.history = kept["step"], kept["best"], kept["history"]


def _batches(training: Tensor, recipe: Recipe) -> Tensor:
    """Places [steps,B] from repeated shuffles of the training split."""
    generator = torch.Generator().manual_seed(recipe.seed)
    size = min(recipe.batch_size, len(training))
    queue, batches = torch.empty(0, dtype=torch.long), []
    for _ in range(recipe.steps):
        if len(queue) < size:
            queue = torch.cat([queue, training[torch.randperm(len(training), generator=generator)]])
        batches.append(queue[:size])
        queue = queue[size:]
    return torch.stack(batches)


def _snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
