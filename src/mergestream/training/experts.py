"""The base and the experts on disk: trained from a shared start, each on its own domain, never redone."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergestream.data.datasets.base import DomainData
from mergestream.networks.architecture import Network, create_network, from_architecture
from mergestream.pool.checkpoint import BASE, CARD, ExpertCard, open_weights, read_card, write_expert
from mergestream.runtime.errors import MergestreamError, NetworkError, TrainingError
from mergestream.runtime.files import sha256_of_json
from mergestream.runtime.option_checks import one_of
from mergestream.runtime.seeding import cpu_threads, seeded
from mergestream.training.fitting import Fit, Keeping, OnLook, OnStep, fit, ignore
from mergestream.training.recipe import Recipe
from mergestream.training.splitting import split
from mergestream.training.starts import HEAD_INITS, average_heads, fit_probe, head_state, redraw_head, zero_head

# Raised whenever the same recipe would give other weights: cached experts are then trained again.
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
    """A start whose encoder is pretrained on `data`, with a head for `classes`."""
    described = _described(recipe, data, network=network, arguments=arguments, classes=classes, head_init=head_init)
    cached = _cached(folder, described)
    if cached:
        return cached
    with seeded(recipe.seed):
        archive = create_network(network, num_classes=len(data.classes), **arguments)
    pretrained = fit(archive, data, recipe, on_step, keeping=Keeping(_unfinished(folder, described))).state
    heads = head_state(archive)
    encoder = {name: tensor for name, tensor in pretrained.items() if name not in heads}
    return write_start(folder, network, arguments, classes, encoder, head_init, recipe.seed, described)


def write_start(
    folder: Path,
    network: str,
    arguments: dict[str, Any],
    classes: tuple[str, ...],
    encoder: Mapping[str, Tensor] | None,
    head_init: str,
    seed: int,
    described: dict[str, Any] | None = None,
) -> ExpertCard:
    """The base folder: an encoder (given, or random) and where every site's head starts.

    With 'independent' each site draws its own head when it trains; with 'linear_probe' the head is zero until
    `put_probes` has averaged the sites'.
    """
    one_of("head_init", head_init, HEAD_INITS)
    with seeded(seed):
        start = create_network(network, num_classes=len(classes), **arguments)
    own = start.module.state_dict()
    missing = sorted(set(own) - set(head_state(start)) - set(encoder or own))
    unknown = sorted(set(encoder or ()) - set(own))
    if missing or unknown:
        raise NetworkError(
            f"The encoder does not fit '{network}': it lacks {missing[:3]}, and has besides {unknown[:3]}."
        )
    start.module.load_state_dict({**own, **(encoder or {})})
    if head_init in ("zero", "linear_probe"):
        zero_head(start)
    recipe = described or _plain({"network": network, "arguments": arguments, "classes": classes, "seed": seed})
    card = ExpertCard.for_network(BASE, start, classes, recipe={**recipe, "head_init": head_init})
    return write_expert(folder, start.module.state_dict(), card)


def probe(base: Path, data: DomainData, recipe: Recipe) -> dict[str, Tensor]:
    """One site's head, fitted from zero on the base's frozen encoder and its own training split."""
    start = read_card(base)
    network = _network_of(base, start)
    if network.preprocessing is None:
        raise NetworkError("Training needs to know the network's preprocessing; give preprocessing=.")
    training, _ = split(len(data), recipe.validation_share, recipe.splits_by, data.groups)
    device = torch.device("cuda" if recipe.accelerator != "cpu" and torch.cuda.is_available() else "cpu")
    network.module.to(device)
    with seeded(recipe.seed), cpu_threads(recipe.threads):
        inputs = (network.preprocessing(data.batch(part).to(device)) for part in training.split(128))
        return fit_probe(network, inputs, data.labels[training].to(device))


def put_probes(base: Path, heads: list[Mapping[str, Tensor]]) -> ExpertCard:
    """Write the average of the sites' probes into the base folder."""
    start = read_card(base)
    state = {**dict(open_weights(base, start)), **average_heads(heads)}
    return write_expert(base, state, start)


def train_expert(
    folder: Path,
    base: Path,
    data: DomainData,
    recipe: Recipe,
    on_step: OnStep = ignore,
    *,
    on_look: OnLook = ignore,
    keep_every: float = 0.0,
) -> ExpertCard:
    """One site's expert, from the shared start and its own data alone. An expert of the same content is not redone.

    A fit under way is written down at a look at the validation split, at most every `keep_every` seconds.
    """
    start = read_card(base)
    if start.classes != data.classes:
        raise TrainingError(f"The base is for {start.classes}, the data of '{data.name}' have {data.classes}.")
    head_init = start.recipe.get("head_init", "shared")
    described = _described(recipe, data, base_sha256=start.weights_sha256, head_init=head_init)
    cached = _cached(folder, described)
    if cached:
        return cached
    network = _network_of(base, start)
    if head_init == "independent":
        redraw_head(network, recipe.seed, data.name)
    keeping = Keeping(_unfinished(folder, described), keep_every)
    fitted = fit(network, data, recipe, on_step, on_look=on_look, keeping=keeping)
    return _write(folder, network, data, fitted, described, start)


def _write(
    folder: Path, network: Network, data: DomainData, fitted: Fit, described: dict[str, Any], start: ExpertCard
) -> ExpertCard:
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
            "execution": fitted.how,
        },
        recipe=described,
        temperature=fitted.temperature,
        base_sha256=start.weights_sha256,
    )
    return write_expert(folder, fitted.state, card)


def _network_of(base: Path, start: ExpertCard) -> Network:
    with seeded(0):  # its random weights are overwritten at once
        network = from_architecture(start.architecture)
    network.module.load_state_dict(dict(open_weights(base, start)))
    return network


def _unfinished(folder: Path, described: dict[str, Any]) -> Path:
    """Where a fit that is not finished is written down: beside its folder, by its recipe; those of other recipes go."""
    name = f".{folder.name}.{sha256_of_json(described)[:12]}.unfinished"
    for other in folder.parent.glob(f".{folder.name}.*.unfinished"):
        if other.name != name:
            other.unlink()
    return folder.with_name(name)


def _described(recipe: Recipe, data: DomainData, **more: Any) -> dict[str, Any]:
    return _plain({**asdict(recipe), "data": data.fingerprint(), "revision": REVISION, **more})


def _plain(described: dict[str, Any]) -> dict[str, Any]:
    """As it will be read back from a card: JSON has no tuples."""
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
