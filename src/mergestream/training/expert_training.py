"""Experts on disk: trained from the shared base, each on its own domain, and never trained twice."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mergestream.data.datasets.domain_data import DomainData
from mergestream.networks.architecture import create_network
from mergestream.pool.checkpoint import open_weights, write_expert
from mergestream.pool.expert_card import ExpertCard, read_card
from mergestream.runtime.errors import MergestreamError, TrainingError
from mergestream.runtime.files import sha256_of_json
from mergestream.runtime.seeding import seeded
from mergestream.training.base_checkpoint import as_json, load_network, write_start
from mergestream.training.heads import head_state, redraw_head
from mergestream.training.recipe import Recipe
from mergestream.training.training_loop import FitCheckpoint, OnStep, OnValidation, fit, ignore

# Raise this whenever the same recipe gives other weights: cached experts are then trained again.
REVISION = 3


def train_base(
    folder: Path,
    network: str,
    arguments: dict[str, Any],
    data: DomainData,
    classes: tuple[str, ...],
    recipe: Recipe,
    on_step: OnStep = ignore,
    *,
    head_init: str = "shared",
) -> ExpertCard:
    """Train a base whose encoder is pretrained on `data` and whose head is for `classes`; reuse a finished one."""
    full_recipe = _full_recipe(recipe, data, network=network, arguments=arguments, classes=classes, head_init=head_init)
    cached = _cached_card(folder, full_recipe)
    if cached:
        return cached
    with seeded(recipe.seed):
        pretraining = create_network(network, num_classes=len(data.classes), **arguments)
    state = fit(pretraining, data, recipe, on_step, checkpoint=FitCheckpoint(_unfinished(folder, full_recipe))).state
    heads = head_state(pretraining)
    encoder = {name: tensor for name, tensor in state.items() if name not in heads}
    return write_start(folder, network, arguments, classes, encoder, head_init, recipe.seed, full_recipe)


def train_expert(
    folder: Path,
    base: Path,
    data: DomainData,
    recipe: Recipe,
    on_step: OnStep = ignore,
    *,
    on_validation: OnValidation = ignore,
    keep_every: float = 0.0,
) -> ExpertCard:
    """Train one site's expert from the shared base and the site's own data; reuse a finished one of the same recipe.

    The state of the fit is saved at a validation, at most every `keep_every` seconds.
    """
    start = read_card(base)
    if start.classes != data.classes:
        raise TrainingError(f"The base is for {start.classes}, the data of '{data.name}' have {data.classes}.")
    head_init = start.recipe.get("head_init", "shared")
    full_recipe = _full_recipe(recipe, data, base_sha256=start.weights_sha256, head_init=head_init)
    cached = _cached_card(folder, full_recipe)
    if cached:
        return cached
    network = load_network(base, start)
    if head_init == "independent":
        redraw_head(network, recipe.seed, data.name)
    checkpoint = FitCheckpoint(_unfinished(folder, full_recipe), keep_every)
    fitted = fit(network, data, recipe, on_step, on_validation=on_validation, checkpoint=checkpoint)
    card = ExpertCard.for_network(
        folder.name,
        network,
        data.classes,
        domain=data.name,
        class_counts=data.class_counts(),
        metrics={
            "validation": fitted.metrics,
            "best_step": fitted.step,
            "criterion": fitted.criterion,
            "execution": fitted.execution,
        },
        recipe=full_recipe,
        temperature=fitted.temperature,
        base_sha256=start.weights_sha256,
    )
    return write_expert(folder, fitted.state, card)


def _unfinished(folder: Path, full_recipe: dict[str, Any]) -> Path:
    """Path of the fit's checkpoint, named by its recipe; checkpoints of other recipes are deleted."""
    name = f".{folder.name}.{sha256_of_json(full_recipe)[:12]}.unfinished"
    for other in folder.parent.glob(f".{folder.name}.*.unfinished"):
        if other.name != name:
            other.unlink()
    return folder.with_name(name)


def _full_recipe(recipe: Recipe, data: DomainData, **more: Any) -> dict[str, Any]:
    """Everything that decides the weights, as the card stores it."""
    return as_json({**asdict(recipe), "data": data.fingerprint(), "revision": REVISION, **more})


def _cached_card(folder: Path, full_recipe: dict[str, Any]) -> ExpertCard | None:
    """Return the card of an intact expert that this recipe made, if there is one."""
    try:
        card = read_card(folder)
        open_weights(folder, card)
    except MergestreamError:
        return None
    return card if card.recipe == full_recipe else None
