"""Experts fine-tuned from a shared start, each on its own domain; the step with the lowest validation loss stays."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mergestream.checkpoints import BASE, CARD, ExpertCard, open_weights, read_card, write_expert
from mergestream.datasets.base import DomainData
from mergestream.determinism import cpu_threads, seeded
from mergestream.errors import MergestreamError, NetworkError, TrainingError
from mergestream.metrics import summarise
from mergestream.networks import Network, create_network, from_architecture
from mergestream.preprocessing import Preprocessing
from mergestream.views import VIEWS

# Raised whenever the same recipe would give other weights: cached experts are then trained again.
REVISION = 1
OnStep = Callable[[], None]


@dataclass(frozen=True)
class Recipe:
    """How to fit a network; all of it goes into the expert's card."""

    steps: int = 200
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    validate_every: int = 20
    validation_share: float = 0.2
    seed: int = 0
    views: tuple[str, ...] = ("hflip",)  # label-preserving, each on a random half of a batch
    accelerator: str = "auto"
    precision: str = "32-true"
    threads: int = 1  # on a CPU the thread count decides the order of sums, and so the bits


@dataclass(frozen=True)
class Fit:
    """The weights of the best step, and how they did on the validation split."""

    state: dict[str, Tensor]
    step: int
    metrics: dict[str, Any]
    temperature: float


def train_base(
    folder: Path,
    network: str,
    arguments: dict[str, Any],
    data: DomainData,
    classes: tuple[str, ...],
    recipe: Recipe,
    on_step: OnStep = lambda: None,
) -> ExpertCard:
    """The consortium's shared start: an encoder pretrained on `data`, and one seeded head for `classes`."""
    described = _describe(recipe, data, network=network, arguments=arguments, classes=classes)
    cached = _cached(folder, described)
    if cached:
        return cached
    with seeded(recipe.seed):
        archive = create_network(network, num_classes=len(data.classes), **arguments)
        start = create_network(network, num_classes=len(classes), **arguments)
    pretrained = fit(archive, data, recipe, on_step).state
    state = start.module.state_dict()
    head = tuple(f"{part}." for part in start.head)
    encoder = {name: tensor for name, tensor in pretrained.items() if not name.startswith(head)}
    card = ExpertCard.for_network(BASE, start, classes, recipe=described)
    return write_expert(folder, {**state, **encoder}, card)


def train_expert(
    folder: Path, base: Path, data: DomainData, recipe: Recipe, on_step: OnStep = lambda: None
) -> ExpertCard:
    """One site's expert, from the shared start and its own data alone. An expert of the same content is not redone."""
    start = read_card(base)
    if start.classes != data.classes:
        raise TrainingError(f"The base is for {start.classes}, the data of '{data.name}' have {data.classes}.")
    described = _describe(recipe, data, base_sha256=start.weights_sha256)
    cached = _cached(folder, described)
    if cached:
        return cached
    with seeded(recipe.seed):
        network = from_architecture(start.architecture)
    network.module.load_state_dict(dict(open_weights(base, start)))
    fitted = fit(network, data, recipe, on_step)
    card = ExpertCard.for_network(
        folder.name,
        network,
        data.classes,
        domain=data.name,
        class_counts=data.class_counts(),
        metrics={"validation": fitted.metrics, "best_step": fitted.step},
        recipe=described,
        temperature=fitted.temperature,
        base_sha256=start.weights_sha256,
    )
    return write_expert(folder, fitted.state, card)


def fit(network: Network, data: DomainData, recipe: Recipe, on_step: OnStep = lambda: None) -> Fit:
    """Minimise cross-entropy on the training split; keep the step that is lowest on the validation split."""
    from lightning.fabric import Fabric

    if network.preprocessing is None:
        raise NetworkError("Training needs to know the network's preprocessing; give preprocessing=.")
    fabric = Fabric(accelerator=recipe.accelerator, devices=1, precision=recipe.precision)  # type: ignore[arg-type]
    training, validation = split(len(data), recipe.validation_share, recipe.seed, data.groups)
    inputs = network.preprocessing(data.images).to(fabric.device)
    labels = data.labels.to(fabric.device)
    with seeded(recipe.seed), cpu_threads(recipe.threads):
        optimiser = torch.optim.AdamW(
            network.module.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        module, optimiser = fabric.setup(network.module.train(), optimiser)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, max_lr=recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
        )
        best: tuple[float, int, dict[str, Tensor]] | None = None
        for step, picked in enumerate(_batches(training, recipe), start=1):
            loss = nn.functional.cross_entropy(
                module(_augmented(inputs[picked], recipe.views, network.preprocessing)), labels[picked]
            )
            optimiser.zero_grad()
            fabric.backward(loss)
            optimiser.step()
            schedule.step()
            if step % recipe.validate_every == 0 or step == recipe.steps:
                value = _loss(module, inputs[validation], labels[validation])
                if not math.isfinite(value):
                    raise TrainingError(
                        f"The loss on '{data.name}' became {value} by step {step}: lower learning_rate."
                    )
                if best is None or value < best[0]:
                    best = value, step, _snapshot(network.module)
            on_step()
    assert best is not None
    network.module.load_state_dict(best[2])
    logits = _predict(module, inputs[validation]).cpu()
    metrics = summarise(torch.softmax(logits, dim=-1), data.labels[validation], data.classes)
    return Fit(best[2], best[1], metrics, fit_temperature(logits, data.labels[validation]))


def split(count: int, share: float, seed: int, groups: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
    """Training and validation indices of a seeded shuffle; a group (slide, patient, lesion) is never cut in two."""
    generator = torch.Generator().manual_seed(seed)
    held_out = max(1, int(share * count))
    if groups is None:
        order = torch.randperm(count, generator=generator)
        return order[held_out:], order[:held_out]
    names, place = np.unique(np.asarray(groups), return_inverse=True)
    if len(names) < 2:
        raise TrainingError(f"All {count} images are of one group ('{names[0]}'): there is nothing to validate on.")
    rank = torch.randperm(len(names), generator=generator)[torch.from_numpy(place)]  # of every image's group
    order = torch.argsort(rank, stable=True)
    # Whole groups until the share is reached; the last group always stays for training.
    boundary = min(int(rank[order[held_out - 1]]), len(names) - 2)
    return order[rank[order] > boundary], order[rank[order] <= boundary]


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature tau that minimises the cross-entropy of z / tau on held-out logits [N,C] (Guo et al. 2017)."""
    log_tau = torch.zeros((), requires_grad=True)
    optimiser = torch.optim.LBFGS([log_tau], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(logits / log_tau.exp(), labels)
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    # A split without a single error asks for tau -> 0; an expert is never trusted that far.
    return float(log_tau.detach().exp().clamp(0.05, 20))


def _describe(recipe: Recipe, data: DomainData, **more: Any) -> dict[str, Any]:
    described = {**asdict(recipe), "data": data.fingerprint(), "revision": REVISION, **more}
    # As it will be read back from a card: JSON has no tuples.
    return dict(json.loads(json.dumps(described)))


def _cached(folder: Path, described: dict[str, Any]) -> ExpertCard | None:
    """The card of an expert that this very recipe made, if it is there and whole."""
    if not (folder / CARD).exists():
        return None
    try:
        card = read_card(folder)
        open_weights(folder, card)
    except MergestreamError:
        return None
    return card if card.recipe == described else None


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


def _augmented(images: Tensor, views: tuple[str, ...], preprocessing: Preprocessing) -> Tensor:
    """Each view on a random half of the batch [B,c,H,W]."""
    for view in views:
        changed = torch.rand(len(images), 1, 1, 1) < 0.5
        images = torch.where(changed.to(images.device), VIEWS[view](images, preprocessing), images)
    return images


@torch.no_grad()
def _predict(module: nn.Module, inputs: Tensor) -> Tensor:
    module.eval()
    logits = torch.cat([module(chunk).float() for chunk in inputs.split(256)])
    module.train()
    return logits


def _loss(module: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    return float(nn.functional.cross_entropy(_predict(module, inputs), labels))


def _snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
