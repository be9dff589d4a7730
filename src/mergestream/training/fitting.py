"""The training loop: Fabric for devices and precision, every step with a seed of its own, resumable at any moment."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.datasets.base import DomainData
from mergestream.determinism import cpu_threads, seeded
from mergestream.errors import CheckpointError, NetworkError, TrainingError
from mergestream.metrics import summarise
from mergestream.networks import Network, logits_of
from mergestream.preprocessing import resize
from mergestream.statefile import read_state, write_state
from mergestream.training.augmentation import augmented, flipped
from mergestream.training.recipe import Recipe
from mergestream.training.splitting import split
from mergestream.training.temperature import fit_temperature

OnStep = Callable[[], None]
CHUNK = 256  # images of one validation forward


@dataclass(frozen=True)
class Fit:
    """The weights of the best step, how they did on the validation split, and the loss there over time."""

    state: dict[str, Tensor]
    step: int
    metrics: dict[str, Any]
    temperature: float
    history: list[dict[str, float]]


def fit(
    network: Network, data: DomainData, recipe: Recipe, on_step: OnStep = lambda: None, *, resume: Path | None = None
) -> Fit:
    """Minimise the recipe's loss on the training split; keep the step whose plain cross-entropy is lowest on the
    validation split, seen without augmentation. With `resume` a killed fit goes on from its last validation.
    """
    from lightning.fabric import Fabric

    if network.preprocessing is None:
        raise NetworkError("Training needs to know the network's preprocessing; give preprocessing=.")
    fabric = Fabric(accelerator=recipe.accelerator, devices=1, precision=recipe.precision)  # type: ignore[arg-type]
    with seeded(recipe.seed), cpu_threads(recipe.threads):
        fitting = _Fitting(fabric, network, data, recipe, resume)
        for step in range(fitting.step + 1, recipe.steps + 1):
            fitting.take(step)
            if step % recipe.validate_every == 0 or step == recipe.steps:
                fitting.validate(step)
            on_step()
        return fitting.finish()


class _Fitting:
    """A fit under way: what a checkpoint must hold is in `_kept`."""

    def __init__(self, fabric: Any, network: Network, data: DomainData, recipe: Recipe, resume: Path | None) -> None:
        self._recipe, self._data, self._resume, self._network = recipe, data, resume, network
        assert network.preprocessing is not None
        self._prepare = network.preprocessing
        self._training, self._validation = split(len(data), recipe.validation_share, recipe.seed, data.groups)
        self._images = resize(data.images, self._prepare.size, self._prepare.interpolation).to(fabric.device)
        self._labels = data.labels.to(fabric.device)
        weights = class_weights(data, self._training) if recipe.loss == "weighted" else None
        self._weights = None if weights is None else weights.to(fabric.device)
        self._fabric = fabric
        add_dropout(network, recipe.dropout)
        optimiser = create_optimiser(network.module, recipe)
        self._module, self._optimiser = fabric.setup(network.module, optimiser)
        self._schedule = create_schedule(self._optimiser, recipe)
        self._batches = list(_batches(self._training, recipe))
        self._best: dict[str, Any] = {"value": math.inf, "step": 0, "state": {}}
        self._history: list[dict[str, float]] = []
        self._loss = torch.zeros((), device=fabric.device)
        self.step = 0
        self._train()
        if resume is not None:
            self._restore(resume)

    def take(self, step: int) -> None:
        """One step. Its randomness comes from its own seed, so a resumed fit needs no generator's state."""
        recipe = self._recipe
        torch.manual_seed(recipe.seed * 1_000_003 + step)
        picked = self._batches[step - 1].to(self._images.device)
        inputs = self._inputs(self._images[picked], augment=True)
        loss = nn.functional.cross_entropy(
            logits_of(self._module(inputs)),
            self._labels[picked],
            weight=self._weights,
            label_smoothing=recipe.label_smoothing,
        )
        self._optimiser.zero_grad()
        self._fabric.backward(loss)
        self._optimiser.step()
        if self._schedule is not None:
            self._schedule.step()
        self._loss = loss.detach()

    def validate(self, step: int) -> None:
        logits = self._predict().float()
        value = float(nn.functional.cross_entropy(logits, self._labels[self._validation.to(logits.device)]))
        if not math.isfinite(value):
            raise TrainingError(f"The loss on '{self._data.name}' became {value} by step {step}: lower learning_rate.")
        self._history.append({"step": step, "training_loss": float(self._loss), "validation_loss": value})
        if value < self._best["value"]:
            self._best = {"value": value, "step": step, "state": _snapshot(self._network.module)}
        self.step = step
        if self._resume is not None and step < self._recipe.steps:
            write_state(self._resume, self._kept())

    def finish(self) -> Fit:
        self._network.module.load_state_dict(self._best["state"])
        logits = self._predict().float().cpu()
        labels = self._data.labels[self._validation]
        metrics = summarise(torch.softmax(logits, dim=-1), labels, self._data.classes)
        temperature = fit_temperature(logits, labels)
        if self._resume is not None:
            self._resume.unlink(missing_ok=True)
        return Fit(self._best["state"], self._best["step"], metrics, temperature, self._history)

    def _inputs(self, images: Tensor, *, augment: bool) -> Tensor:
        pixels = images.to(torch.float32) / 255
        if not augment:
            return self._prepare.normalised(pixels)
        prepared = self._prepare.normalised(augmented(pixels, self._recipe.augmentation))
        return flipped(prepared, self._recipe.views, self._prepare)

    @torch.no_grad()
    def _predict(self) -> Tensor:
        self._module.eval()
        places = self._validation.to(self._images.device).split(CHUNK)
        logits = [logits_of(self._module(self._inputs(self._images[p], augment=False))) for p in places]
        self._train()
        return torch.cat(logits)

    def _train(self) -> None:
        self._module.train()
        if self._recipe.freeze_bn:
            for module in self._network.module.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    def _kept(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "module": self._network.module.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
            "best": self._best,
            "history": self._history,
        }

    def _restore(self, path: Path) -> None:
        """Take up what was written; from nothing, or from what is not sound, the fit begins anew."""
        if not path.exists():
            return
        try:
            kept = read_state(path)
        except CheckpointError:
            return
        self._network.module.load_state_dict(kept["module"])
        self._optimiser.load_state_dict(kept["optimiser"])
        if self._schedule is not None:
            self._schedule.load_state_dict(kept["schedule"])
        self.step, self._best, self._history = kept["step"], kept["best"], kept["history"]


def class_weights(data: DomainData, training: Tensor) -> Tensor:
    """Weights [C] of the loss, inverse to the training split's class counts; 0 for a class that it lacks."""
    counts = torch.bincount(data.labels[training], minlength=len(data.classes)).float()
    present = counts > 0
    return torch.where(present, counts.sum() / (present.sum() * counts.clamp_min(1)), 0)


def create_optimiser(module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, **options)
    kind = torch.optim.Adam if recipe.optimiser == "adam" else torch.optim.AdamW
    return kind(parameters, **options)


def create_schedule(optimiser: Any, recipe: Recipe) -> torch.optim.lr_scheduler.LRScheduler | None:
    if recipe.schedule == "constant":
        return None
    return torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )


def add_dropout(network: Network, share: float) -> None:
    """Dropout before the head, whatever the network calls it."""

    def dropped(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return nn.functional.dropout(given[0], share, module.training), *given[1:]

    if share:
        network.module.get_submodule(network.head[0]).register_forward_pre_hook(dropped)


def _batches(training: Tensor, recipe: Recipe) -> Iterator[Tensor]:
    """`steps` batches from repeated shuffles of the training split."""
    generator = torch.Generator().manual_seed(recipe.seed)
    size = min(recipe.batch_size, len(training))
    queue = torch.empty(0, dtype=torch.long)
    for _ in range(recipe.steps):
        if len(queue) < size:
            queue = torch.cat([queue, training[torch.randperm(len(training), generator=generator)]])
        yield queue[:size]
        queue = queue[size:]


def _snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
