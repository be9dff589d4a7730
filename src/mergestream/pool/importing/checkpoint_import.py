"""Foreign checkpoints (timm, torchvision, Hugging Face, MONAI, plain state dicts) -> an expert folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergestream.networks.architecture import Network
from mergestream.networks.flat_layout import Layout
from mergestream.networks.head import count_classes, find_head
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.exchange.pool_folder import require_new_folder
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.importing.foreign_checkpoint import (
    ForeignCheckpoint,
    read_foreign,
    require_names,
    without_prefixes,
)
from mergestream.pool.importing.hugging_face import with_current_names
from mergestream.pool.importing.network_by_name import network_by_name
from mergestream.pool.importing.pixel_settings import merged_preprocessing, pixel_config
from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.files import sha256_of_file
from mergestream.runtime.option_text import parse_value

Values = Mapping[str, Any]


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
    """Every tensor of the network must be in the file and the other way round; nothing is downloaded or run.

    `pixels` (size, mean, std, interpolation) says what the network expects, where that is not known or was another.
    """
    require_new_folder(out)
    foreign = read_foreign(file)
    config = _json_beside(foreign.path, "config.json")
    built = network_by_name(network, tuple(classes), config, dict(arguments or {}))
    built = replace(built, head=find_head(built.module, head)) if head else built
    known = {**pixel_config(config, _json_beside(foreign.path, "preprocessor_config.json")), **(pixels or {})}
    built = replace(built, preprocessing=merged_preprocessing(built.preprocessing, known))
    answers = count_classes(built.module, built.head)
    if answers not in (None, len(classes)):
        raise InputError(f"{len(classes)} classes were given, but the head {built.head} answers {answers}.")
    state = _fitted(foreign, built, ignore)
    recipe = {"imported": {"sha256": sha256_of_file(foreign.path), "kind": foreign.path.suffix.lstrip(".")}}
    card = ExpertCard.for_network(out.name, built, tuple(classes), domain=domain, recipe=recipe)
    return write_expert(out, state, card)


def network_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """'img_size=126' as a name and a value, spelt as options are everywhere."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--arg is NAME=VALUE, as in img_size=126; got {pair!r}.")
        # As it will be read back from the card: JSON has no tuples.
        found[name] = json.loads(json.dumps(parse_value(text)))
    return found


def in_words(card: ExpertCard, out: Path) -> list[str]:
    said = [f"Expert '{card.name}' ({card.architecture}; {', '.join(card.classes)}): {out}"]
    if card.preprocessing is None:
        said.append("What it expects of pixels is not known, so it takes prepared floats only; say it with --size.")
    return said


def _json_beside(path: Path, name: str) -> dict[str, Any]:
    """A configuration that lies with the weights; empty where there is none."""
    file = path.with_name(name)
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON ({error}).") from error
    return value if isinstance(value, dict) else {}


def _fitted(foreign: ForeignCheckpoint, network: Network, ignore: Sequence[str]) -> dict[str, Tensor]:
    """The file's tensors in the network's order; a misfit of names, shapes, types or numbers is refused."""
    layout = Layout.of(network.module, network.head)
    needed = {entry.name for entry in layout.entries} | set(layout.integers)
    allowed = needed | {name for entry in layout.entries for name in entry.tied}
    tensors = without_prefixes(foreign.tensors, allowed, ignore, foreign.path)
    if network.architecture.library == "transformers" and not needed <= set(tensors):
        tensors = with_current_names(network.module, tensors, foreign.path)
    require_names(tensors, needed, allowed, foreign.path)
    kinds = sorted({tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}, key=str)
    row = torch.empty(layout.size, dtype=reduce(torch.promote_types, kinds))
    integers = layout.write_row(tensors, row, str(foreign.path))
    return {**layout.views(row), **integers}
