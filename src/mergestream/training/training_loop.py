"""The training loop: steps, validations, the best step kept, resumable at any moment."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mergestream.data.datasets.domain_data import DomainData
from mergestream.functional.label_free import validation_summary
from mergestream.functional.metrics import risk_by_confidence, summarise
from mergestream.networks.architecture import Network, logits_of
from mergestream.networks.preprocessing import resizer
from mergestream.runtime.errors import TrainingError
from mergestream.runtime.seeding import cpu_threads, seeded
from mergestream.runtime.state_file import SavedState
from mergestream.training.heads import minimise
from mergestream.training.recipe import Recipe
from mergestream.training.stepper import COMPILED, Stepper, autocast, choose_device, choose_execution, shared_network

OnStep = Callable[[], None]
OnValidation = Callable[[dict[str, float]], None]
TEMPERATURE_LIMITS = (0.05, 20.0)
VALIDATION_BATCH = 256


def ignore(*_: object) -> None:
    """The default callback; a named function, because other processes must be able to import it."""


@dataclass(frozen=True)
class Fit:
    """The weights of the best step, their validation metrics, and the losses over time."""

    state: dict[str, Tensor]
    step: int
    metrics: dict[str, Any]
    temperature: float
    history: list[dict[str, float]]
    execution: str  # eager, graph or compiled graph
    criterion: float  # the value that chose the step


def fit(
    network: Network,
    data: DomainData,
    recipe: Recipe,
    on_step: OnStep = ignore,
    *,
    on_validation: OnValidation = ignore,
    checkpoint: SavedState | None = None,
) -> Fit:
    """Minimise the recipe's loss on the training split; keep the step that does best on the validation split.

    The validation split is never augmented. With a `checkpoint` a killed fit continues from its last saved state, and
    reports its earlier validations again.
    """
    with seeded(recipe.seed), cpu_threads(recipe.threads):
        loop = _Loop(network, data, recipe, checkpoint)
        for line in loop.history:
            on_validation(line)
        for step in range(loop.step + 1, recipe.steps + 1):
            loop.stepper.take(step)
            on_step()
            if step % recipe.validate_every == 0 or step == recipe.steps:
                on_validation(loop.validate(step))
        return loop.finish()


class _Loop:
    """A fit under way; `_state` lists what its checkpoint holds."""

    def __init__(self, network: Network, data: DomainData, recipe: Recipe, checkpoint: SavedState | None) -> None:
        preprocessing, device = network.require_preprocessing(), choose_device(recipe)
        if choose_execution(recipe, device) == COMPILED:
            network = shared_network(network, recipe)
        network.module.to(device)
        self._recipe, self._data, self._checkpoint = recipe, data, checkpoint
        self._module, self._preprocessing, self._device = network.module, preprocessing, device
        training, self._validation = split_of(data, asdict(recipe))
        self._images = resizer(preprocessing.size, preprocessing.interpolation)(data.images).to(device)
        self._labels = data.labels.to(device)
        weights = class_weights(data, training).to(device) if recipe.loss == "weighted" else None
        self.stepper = Stepper(network, self._images, self._labels, _batches(training, recipe), recipe, weights)
        self._best: dict[str, Any] = {"value": math.inf, "step": 0, "state": {}}
        self.history: list[dict[str, float]] = []
        self.step = 0
        self._set_train_mode()
        self._restore()

    def validate(self, step: int) -> dict[str, float]:
        """Evaluate the current weights on the validation split, keep them if they are the best, and save the state."""
        logits, labels = self._predict(), self._labels[self._validation.to(self._device)]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = float(losses.mean())
        if not math.isfinite(loss):
            raise TrainingError(f"The loss on '{self._data.name}' became {loss} by step {step}: lower learning_rate.")
        accuracy = float((logits.argmax(dim=-1) == labels).float().mean())
        line = {"step": step, "training_loss": float(self.stepper.loss), "validation_loss": loss}
        line["validation_accuracy"] = accuracy
        self.history.append(line)
        value = loss if self._recipe.criterion == "plain" else balanced_loss(losses, labels)
        if value < self._best["value"]:
            state = {name: tensor.detach().cpu().clone() for name, tensor in self._module.state_dict().items()}
            self._best = {"value": value, "step": step, "state": state}
        self.step = step
        if self._checkpoint is not None and step < self._recipe.steps:
            self._checkpoint.save_if_due(self._state)
        return line

    def finish(self) -> Fit:
        best = self._best
        self._module.load_state_dict(best["state"])
        logits = self._predict().cpu()
        labels = self._data.labels[self._validation]
        probabilities = torch.softmax(logits, dim=-1)
        metrics = summarise(probabilities, labels, self._data.classes)
        metrics["risk_by_confidence"] = risk_by_confidence(probabilities, labels)
        metrics["mean_probability"] = dict(zip(self._data.classes, probabilities.mean(dim=0).tolist(), strict=True))
        if self._checkpoint is not None:
            self._checkpoint.remove()
        temperature, execution = fit_temperature(logits, labels), self.stepper.execution
        # Without an error the temperature tells nothing, and methods take at least 1.
        used = max(temperature, 1.0) if metrics["accuracy"] == 1 else temperature
        calibrated = torch.softmax(logits.double() / used, dim=-1).numpy()
        metrics["label_free"] = validation_summary(calibrated, labels.numpy(), self._data.classes)
        return Fit(best["state"], best["step"], metrics, temperature, self.history, execution, best["value"])

    @torch.no_grad()
    def _predict(self) -> Tensor:
        """Logits [N,C] of the validation split, uncompiled: its shapes would need another compilation."""
        module = self._module.eval()
        logits = []
        with autocast(self._recipe, self._device):
            for indices in self._validation.to(self._device).split(VALIDATION_BATCH):
                pixels = self._images[indices].to(torch.float32) / 255
                logits.append(logits_of(module(self._preprocessing.normalised(pixels))).float())
        self._set_train_mode()
        return torch.cat(logits)

    def _set_train_mode(self) -> None:
        self._module.train()
        if self._recipe.freeze_bn:
            for module in self._module.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    def _state(self) -> dict[str, Any]:
        own = {"step": self.step, "best": self._best, "history": self.history}
        return {**own, "module": self._module.state_dict(), **self.stepper.state_dict()}

    def _restore(self) -> None:
        state = None if self._checkpoint is None else self._checkpoint.load()
        if state is not None:
            self._module.load_state_dict(state["module"])
            self.stepper.load_state_dict(state)
            self.step, self._best, self.history = state["step"], state["best"], state["history"]


def _batches(training: Tensor, recipe: Recipe) -> Tensor:
    """Indices [steps,B] from repeated shuffles of the training split."""
    generator = torch.Generator().manual_seed(recipe.seed)
    size = min(recipe.batch_size, len(training))
    queue, batches = torch.empty(0, dtype=torch.long), []
    for _ in range(recipe.steps):
        if len(queue) < size:
            queue = torch.cat([queue, training[torch.randperm(len(training), generator=generator)]])
        batches.append(queue[:size])
        queue = queue[size:]
    return torch.stack(batches)


def class_weights(data: DomainData, training: Tensor) -> Tensor:
    """Weights [C] of the loss, inverse to the training split's class counts; 0 for a class without images."""
    counts = torch.bincount(data.labels[training], minlength=len(data.classes)).float()
    present = counts > 0
    return torch.where(present, counts.sum() / (present.sum() * counts.clamp_min(1)), 0)


def split_of(data: DomainData, recipe: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Training and validation indices of a domain's images under a recipe, as a card holds it; groups stay whole."""
    seed = recipe["seed"] if recipe.get("split_seed") is None else recipe["split_seed"]
    return split(len(data), recipe["validation_share"], int(seed), data.groups)


def split(count: int, share: float, seed: int, groups: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
    """Shuffle with a seed and return training and validation indices; a group (slide, patient, lesion) stays whole."""
    generator = torch.Generator().manual_seed(seed)
    held_out = max(1, int(share * count))
    if count < 2:
        raise TrainingError("One image cannot be split: training needs at least one, validation another.")
    if groups is None:
        order = torch.randperm(count, generator=generator)
        return order[held_out:], order[:held_out]
    names, group = np.unique(np.asarray(groups), return_inverse=True)
    if len(names) < 2:
        raise TrainingError(f"All {count} images are of one group ('{names[0]}'): there is nothing to validate on.")
    rank = torch.randperm(len(names), generator=generator)[torch.from_numpy(group)]  # per image
    order = torch.argsort(rank, stable=True)
    # Whole groups until the share is reached; at least one group remains for training.
    boundary = min(int(rank[order[held_out - 1]]), len(names) - 2)
    return order[rank[order] > boundary], order[rank[order] <= boundary]


def balanced_loss(losses: Tensor, labels: Tensor) -> float:
    """Mean over the classes of each class's mean loss [N]; classes without images are left out."""
    return float(torch.stack([losses[labels == label].mean() for label in labels.unique()]).mean())


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature tau that minimises the cross-entropy of z / tau on logits [N,C] (Guo et al. 2017)."""
    log_tau = torch.zeros((), requires_grad=True)
    minimise([log_tau], lambda: nn.functional.cross_entropy(logits / log_tau.exp(), labels), 100)
    # A split without a single error would push tau to 0; no expert is trusted that far.
    return float(log_tau.detach().exp().clamp(*TEMPERATURE_LIMITS))
