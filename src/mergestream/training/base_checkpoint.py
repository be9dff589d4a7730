"""The shared base of a consortium: an encoder, and the head from which every site starts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mergestream.data.datasets.domain_data import DomainData
from mergestream.networks.architecture import Network, create_network, from_architecture
from mergestream.pool.checkpoint import open_weights, write_expert
from mergestream.pool.expert_card import BASE, ExpertCard, read_card
from mergestream.runtime.errors import NetworkError
from mergestream.runtime.option_checks import one_of
from mergestream.runtime.seeding import cpu_threads, seeded
from mergestream.training.head_start import HEAD_INITS, average_heads, fit_probe, head_state, zero_head
from mergestream.training.precision import choose_device
from mergestream.training.recipe import Recipe
from mergestream.training.validation_split import split


def write_start(
    folder: Path,
    network: str,
    arguments: dict[str, Any],
    classes: tuple[str, ...],
    encoder: Mapping[str, Tensor] | None,
    head_init: str,
    seed: int,
    recipe: dict[str, Any] | None = None,
) -> ExpertCard:
    """Write the base folder: an encoder (given, or random) and the initial head.

    With 'independent' each site draws its own head when it trains; with 'linear_probe' the head is zero until
    `put_probes` writes the average of the sites' heads.
    """
    one_of("head_init", head_init, HEAD_INITS)
    with seeded(seed):
        start = create_network(network, num_classes=len(classes), **arguments)
    initial = start.module.state_dict()
    missing = sorted(set(initial) - set(head_state(start)) - set(encoder or initial))
    unknown = sorted(set(encoder or ()) - set(initial))
    if missing or unknown:
        raise NetworkError(
            f"The encoder does not fit '{network}': it lacks {missing[:3]}, and has besides {unknown[:3]}."
        )
    start.module.load_state_dict({**initial, **(encoder or {})})
    if head_init in ("zero", "linear_probe"):
        zero_head(start)
    recipe = recipe or as_json({"network": network, "arguments": arguments, "classes": classes, "seed": seed})
    card = ExpertCard.for_network(BASE, start, classes, recipe={**recipe, "head_init": head_init})
    return write_expert(folder, start.module.state_dict(), card)


def load_network(folder: Path, card: ExpertCard) -> Network:
    with seeded(0):  # the random weights are overwritten at once
        network = from_architecture(card.architecture)
    network.module.load_state_dict(dict(open_weights(folder, card)))
    return network


def probe(base: Path, data: DomainData, recipe: Recipe) -> dict[str, Tensor]:
    """Fit one site's head from zero on the base's frozen encoder and the site's training split."""
    network = load_network(base, read_card(base))
    if network.preprocessing is None:
        raise NetworkError("Training needs to know the network's preprocessing; give preprocessing=.")
    training, _ = split(len(data), recipe.validation_share, recipe.seed_of_split, data.groups)
    device = choose_device(recipe)
    network.module.to(device)
    with seeded(recipe.seed), cpu_threads(recipe.threads):
        inputs = (network.preprocessing(data.batch(part).to(device)) for part in training.split(128))
        return fit_probe(network, inputs, data.labels[training].to(device))


def put_probes(base: Path, heads: list[Mapping[str, Tensor]]) -> ExpertCard:
    """Write the average of the sites' heads into the base folder."""
    card = read_card(base)
    return write_expert(base, {**dict(open_weights(base, card)), **average_heads(heads)}, card)


def as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Convert values to what a card will return for them: JSON has no tuples."""
    return dict(json.loads(json.dumps(values)))
