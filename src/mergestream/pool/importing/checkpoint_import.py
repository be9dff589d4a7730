"""Import of one foreign checkpoint as an expert folder."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergestream.networks.architecture import Network
from mergestream.networks.flat_layout import Layout
from mergestream.networks.head import find_head
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.exchange.pool_folder import require_new_folder
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.importing.foreign_checkpoint import (
    ForeignCheckpoint,
    read_foreign,
    require_names,
    with_current_names,
    without_prefixes,
)
from mergestream.pool.importing.foreign_config import (
    Values,
    merged_preprocessing,
    network_by_name,
    pixel_config,
    read_config,
)
from mergestream.pool.parts import require_classes
from mergestream.runtime.errors import InputError
from mergestream.runtime.files import sha256_of_file
from mergestream.runtime.option_text import parse_value


def import_expert(
    out: Path,
    file: Path,
    *,
    network: str,
    classes: Sequence[str],
    domain: str | None = None,
    head: str | None = None,
    arguments: Values | None = None,
    pixels: Values | None = None,
    ignore: Sequence[str] = (),
) -> ExpertCard:
    """Write a checkpoint as an expert folder; the file must hold exactly the network's tensors.

    Nothing is downloaded, and no code in the file runs. `pixels` (size, mean, std, interpolation) overrides the
    preprocessing recorded with the network.
    """
    require_new_folder(out)
    foreign = read_foreign(file)
    config = read_config(foreign.path, "config.json")
    built = network_by_name(network, tuple(classes), config, dict(arguments or {}))
    built = replace(built, head=find_head(built.module, head)) if head else built
    recorded = {**pixel_config(config, read_config(foreign.path, "preprocessor_config.json")), **(pixels or {})}
    built = replace(built, preprocessing=merged_preprocessing(built.preprocessing, recorded))
    require_classes(classes, built)
    state = _fitted(foreign, built, ignore)
    recipe = {"imported": {"sha256": sha256_of_file(foreign.path), "kind": foreign.path.suffix.lstrip(".")}}
    card = ExpertCard.for_network(out.name, built, tuple(classes), domain=domain, recipe=recipe)
    return write_expert(out, state, card)


def network_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse 'img_size=126' into names and values, with the same syntax as options."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--arg is NAME=VALUE, as in img_size=126; got {pair!r}.")
        # JSON has no tuples: use the values as they will be read back from the card.
        arguments[name] = json.loads(json.dumps(parse_value(text)))
    return arguments


def import_lines(card: ExpertCard, out: Path) -> list[str]:
    """Summary of an imported expert."""
    lines = [f"Expert '{card.name}' ({card.architecture}; {', '.join(card.classes)}): {out}"]
    if card.preprocessing is None:
        lines.append("Its preprocessing is unknown, so it takes preprocessed floats only; give --size to set it.")
    return lines


def _fitted(foreign: ForeignCheckpoint, network: Network, ignore: Sequence[str]) -> dict[str, Tensor]:
    """Put the file's tensors into the network's order; refuse wrong names, shapes, types or numbers."""
    layout = Layout.of(network.module, network.head)
    tensors = without_prefixes(foreign.tensors, layout.allowed_names, ignore, foreign.path)
    if network.architecture.library == "transformers" and not layout.required_names <= set(tensors):
        tensors = with_current_names(network.module, tensors, foreign.path)
    require_names(tensors, layout.required_names, layout.allowed_names, foreign.path)
    kinds = sorted({tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}, key=str)
    row = torch.empty(layout.size, dtype=reduce(torch.promote_types, kinds))
    integers = layout.write_row(tensors, row, str(foreign.path))
    return {**layout.views(row), **integers}
