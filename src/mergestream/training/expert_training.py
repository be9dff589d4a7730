"""The shared base and the experts on disk: each expert is trained on its own domain, and nothing is trained twice."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergestream.data.datasets.domain_data import DomainData
from mergestream.networks.architecture import Network, create_network, from_architecture
from mergestream.pool.checkpoint import PICKLES, WeightsFile, open_weights, write_expert
from mergestream.pool.expert_card import BASE, ExpertCard, read_card
from mergestream.runtime.errors import (
    CheckpointError,
    InputError,
    MergestreamError,
    NetworkError,
    OutputError,
    TrainingError,
    some,
)
from mergestream.runtime.files import json_round_trip, sha256_of_json
from mergestream.runtime.option_checks import one_of
from mergestream.runtime.seeding import cpu_threads, seeded
from mergestream.runtime.state_file import SavedState
from mergestream.training.heads import DRAWN, HEAD_INITS, fit_probe, head_state, redraw_head, zero_head
from mergestream.training.published_weights import load_published
from mergestream.training.recipe import Recipe
from mergestream.training.stepper import choose_device
from mergestream.training.training_loop import OnStep, OnValidation, fit, ignore, split_of

# Raise this whenever the same recipe gives other weights: cached experts are then trained again.
REVISION = 3
RANDOM, PRETRAINED = "random", "pretrained"


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
    if cached := _cached_card(folder, full_recipe):
        return cached
    with seeded(recipe.seed):
        pretraining = create_network(network, num_classes=len(data.classes), **arguments)
    state = fit(pretraining, data, recipe, on_step, checkpoint=SavedState(_unfinished(folder, full_recipe))).state
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
        ours, theirs = some(start.classes), some(data.classes)
        raise TrainingError(f"The base is for the classes {ours}; the data of '{data.name}' have {theirs}.")
    head_init = start.recipe.get("head_init", "shared")
    full_recipe = _full_recipe(recipe, data, base_sha256=start.weights_sha256, head_init=head_init)
    if cached := _cached_card(folder, full_recipe):
        return cached
    network = load_network(base, start)
    if head_init in DRAWN:
        redraw_head(network, recipe.seed, data.name, DRAWN[head_init])
    checkpoint = SavedState(_unfinished(folder, full_recipe), keep_every)
    fitted = fit(network, data, recipe, on_step, on_validation=on_validation, checkpoint=checkpoint)
    metrics = {"validation": fitted.metrics, "best_step": fitted.step}
    card = ExpertCard.for_network(
        folder.name,
        network,
        data.classes,
        domain=data.name,
        class_counts=data.class_counts(),
        metrics={**metrics, "criterion": fitted.criterion, "execution": fitted.execution},
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
    return json_round_trip({**asdict(recipe), "data": data.fingerprint(), "revision": REVISION, **more})


def _cached_card(folder: Path, full_recipe: dict[str, Any]) -> ExpertCard | None:
    """Return the card of an intact expert that this recipe made, if there is one."""
    try:
        card = read_card(folder)
        open_weights(folder, card)
    except MergestreamError:
        return None
    return card if card.recipe == full_recipe else None


def write_start(
    folder: Path,
    network: str,
    arguments: dict[str, Any],
    classes: Sequence[str],
    encoder: Mapping[str, Tensor] | None,
    head_init: str,
    seed: int,
    recipe: dict[str, Any] | None = None,
) -> ExpertCard:
    """Write the base folder: an encoder (given, or random) and the initial head. The card stores the recipe.

    With 'independent' each site draws its own head when it trains; with 'linear_probe' the head is zero until
    `put_probes` writes the average of the sites' heads.
    """
    one_of("head_init", head_init, HEAD_INITS)
    with seeded(seed):
        start = create_network(network, num_classes=len(classes), **arguments)
    try:
        start.module.load_state_dict({**head_state(start), **(encoder or start.module.state_dict())})
    except RuntimeError as error:
        raise NetworkError(f"The encoder does not fit '{network}': {error}") from error
    if head_init in ("zero", "linear_probe"):
        zero_head(start)
    recipe = recipe or {"network": network, "arguments": arguments, "classes": list(classes), "seed": seed}
    card = ExpertCard.for_network(BASE, start, tuple(classes), recipe={**recipe, "head_init": head_init})
    return write_expert(folder, start.module.state_dict(), card)


def base_recipe(
    network: str, arguments: dict[str, Any], init: str, classes: Sequence[str], head_init: str, seed: int
) -> dict[str, Any]:
    """What decides a base that is not trained, as its card stores it."""
    return json_round_trip(dict(locals()))


def write_base(
    pool: Path, network: str, arguments: dict[str, Any], classes: Sequence[str], init: str, head_init: str, seed: int
) -> ExpertCard:
    """Write a new pool's base without training, as `mergestream train` would start one."""
    if (pool / BASE).exists():
        raise OutputError(f"{pool / BASE} exists already and is not overwritten. Choose a new folder.")
    if head_init == "linear_probe":
        raise InputError("head_init='linear_probe' is fitted on images: use 'mergestream train', or another start.")
    if len(set(classes)) < max(2, len(classes)) or not all(classes):
        raise InputError(f"Give two classes or more, all different, as in 'benign,malignant'; got {list(classes)}.")
    recipe = base_recipe(network, arguments, init, classes, head_init, seed)
    encoder = encoder_weights(network, arguments, init)
    return write_start(pool / BASE, network, arguments, classes, encoder, head_init, seed, recipe)


def copy_expert(source: Path, target: Path) -> ExpertCard:
    """Copy weights and card; the copy is named by its folder."""
    card = read_card(source)
    return write_expert(target, dict(open_weights(source, card)), replace(card, name=target.name))


def load_network(folder: Path, card: ExpertCard) -> Network:
    with seeded(0):  # the random weights are overwritten at once
        network = from_architecture(card.architecture)
    network.module.load_state_dict(dict(open_weights(folder, card)))
    return network


def probe(base: Path, data: DomainData, recipe: Recipe) -> dict[str, Tensor]:
    """Fit one site's head from zero on the base's frozen encoder and the site's training split."""
    network = load_network(base, read_card(base))
    preprocessing, (training, _) = network.require_preprocessing(), split_of(data, asdict(recipe))
    device = choose_device(recipe)
    network.module.to(device)
    with seeded(recipe.seed), cpu_threads(recipe.threads):
        inputs = (preprocessing(data.batch(part).to(device)) for part in training.split(128))
        return fit_probe(network, inputs, data.labels[training].to(device))


def put_probes(base: Path, heads: Sequence[Mapping[str, Tensor]]) -> ExpertCard:
    """Write the average of the sites' heads into the base folder; every site counts once."""
    card = read_card(base)
    average = {name: torch.stack([head[name] for head in heads]).mean(dim=0) for name in heads[0]}
    return write_expert(base, {**dict(open_weights(base, card)), **average}, card)


def encoder_weights(network: str, arguments: dict[str, Any], init: str) -> dict[str, Tensor] | None:
    """Return the encoder's weights by name, or None for random ones."""
    if init == RANDOM:
        return None
    if Path(init).suffix in PICKLES:
        raise CheckpointError(f"{init} may be a pickle and is not opened. Convert it: mergestream pool import.")
    state = load_published(network, arguments) if init == PRETRAINED else dict(WeightsFile(Path(init)))
    return _encoder_part(create_network(network, num_classes=2, **arguments), state, init)


def _encoder_part(network: Network, state: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Select the encoder's weights and check names and shapes; timm resamples position embeddings."""
    adapt = getattr(sys.modules[type(network.module).__module__], "checkpoint_filter_fn", None)
    state = adapt(state, network.module) if adapt is not None else state
    heads, own = set(head_state(network)), network.module.state_dict()
    encoder = {name: tensor.to(own[name].dtype) for name, tensor in state.items() if name in own and name not in heads}
    missing = [name for name in own if name not in encoder and name not in heads]
    wrong = [name for name, tensor in encoder.items() if tensor.shape != own[name].shape]
    bad = [name for name, tensor in encoder.items() if tensor.is_floating_point() and not torch.isfinite(tensor).all()]
    for what, names in (("lack", missing), ("have another shape for", wrong), ("are not finite in", bad)):
        if names:
            raise NetworkError(f"The weights of {source} {what} {', '.join(names[:3])} of this network's encoder.")
    return encoder
