"""Import of one foreign checkpoint as an expert folder, with the configuration files beside its weights."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergestream.networks.architecture import Architecture, Network, create_network, find_head, from_module
from mergestream.networks.flat_layout import Layout
from mergestream.networks.libraries import PILLOW_FILTERS
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.exchange.pool_folder import require_new_folder
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.importing.foreign_checkpoint import (
    foreign_file,
    foreign_tensors,
    require_names,
    with_current_names,
    without_prefixes,
)
from mergestream.pool.parts import require_classes
from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.files import sha256_of_file
from mergestream.runtime.option_text import parse_value

# Entries of a Hugging Face configuration that are not arguments of the network.
NOT_ARGUMENTS = (
    "architectures", "auto_map", "transformers_version", "model_type", "_name_or_path", "name_or_path", "torch_dtype",
    "dtype", "num_labels", "id2label", "label2id",
)  # fmt: skip
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
    """Write a checkpoint as an expert folder; the file must hold exactly the network's tensors.

    Nothing is downloaded, and no code in the file runs. `pixels` (size, mean, std, interpolation) overrides the
    preprocessing recorded with the network.
    """
    require_new_folder(out)
    path = foreign_file(file)
    tensors = foreign_tensors(path)
    config = read_config(path, "config.json")
    built = network_by_name(network, tuple(classes), config, dict(arguments or {}))
    built = replace(built, head=find_head(built.module, head)) if head else built
    recorded = {**pixel_config(config, read_config(path, "preprocessor_config.json")), **(pixels or {})}
    built = replace(built, preprocessing=merged_preprocessing(built.preprocessing, recorded))
    require_classes(classes, built)
    state = _fitted(tensors, path, built, ignore)
    recipe = {"imported": {"sha256": sha256_of_file(path), "kind": path.suffix.lstrip(".")}}
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


def _fitted(tensors: Mapping[str, Tensor], path: Path, network: Network, ignore: Sequence[str]) -> dict[str, Tensor]:
    """Put the file's tensors into the network's order; refuse wrong names, shapes, types or numbers."""
    layout = Layout.of(network.module, network.head)
    tensors = without_prefixes(tensors, layout.allowed_names, ignore, path)
    if network.architecture.library == "transformers" and not layout.required_names <= set(tensors):
        tensors = with_current_names(network.module, tensors, path)
    require_names(tensors, layout.required_names, layout.allowed_names, path)
    kinds = sorted({tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}, key=str)
    row = torch.empty(layout.size, dtype=reduce(torch.promote_types, kinds))
    integers = layout.write_row(tensors, row, str(path))
    return {**layout.views(row), **integers}


def read_config(path: Path, name: str) -> dict[str, Any]:
    """Read a configuration file beside the weights; empty if there is none."""
    file = path.with_name(name)
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON ({error}).") from error
    return value if isinstance(value, dict) else {}


def network_by_name(name: str, classes: tuple[str, ...], config: Values, arguments: Values) -> Network:
    """Build by timm name, 'torchvision:NAME', 'transformers:CLASS' or 'monai:CLASS'; `config` lies by the weights."""
    library, _, rest = name.rpartition(":")
    if library == "transformers":
        return _transformers(rest, classes, config, arguments)
    recorded = config.get("architecture")
    if isinstance(recorded, str) and recorded != rest.split(".")[0]:
        raise InputError(f"config.json beside the weights says they are of '{recorded}', not '{rest}'.")
    own = config.get("model_args")
    return create_network(name, num_classes=len(classes), **{**(own if isinstance(own, dict) else {}), **arguments})


def _transformers(name: str, classes: tuple[str, ...], config: Values, arguments: Values) -> Network:
    labels = config.get("id2label")
    recorded = [str(label) for label in labels.values()] if isinstance(labels, dict) else []
    if sorted(recorded) == sorted(classes) and tuple(recorded) != classes:
        raise InputError(f"config.json has the classes in another order: {', '.join(recorded)}. Use that order.")
    own = {key: value for key, value in config.items() if key not in NOT_ARGUMENTS}
    named = {"id2label": dict(enumerate(classes)), "label2id": {label: i for i, label in enumerate(classes)}}
    # Described from the module, so that its card equals that of the same network built in Python.
    return from_module(Architecture("transformers", name, {**own, **arguments, **named}).build().eval())


def pixel_options(size: int | None, mean: str | None, std: str | None, interpolation: str | None) -> dict[str, Any]:
    """The preprocessing options given on the command line."""
    numbers = {"mean": mean, "std": std}
    try:
        channels: dict[str, Any] = {k: tuple(map(float, v.split(","))) for k, v in numbers.items() if v is not None}
    except ValueError:
        raise InputError("--mean and --std are one number per channel, as in 0.5,0.5,0.5.") from None
    given = {"size": None if size is None else (size, size), "interpolation": interpolation}
    return {**channels, **{key: value for key, value in given.items() if value is not None}}


def pixel_config(config: Values, processor: Values) -> dict[str, Any]:
    """The preprocessing in timm's configuration or Hugging Face's processor."""
    own = config.get("pretrained_cfg")
    pixels = {key: own.get(key) for key in ("mean", "std", "interpolation")} if isinstance(own, dict) else {}
    if processor:
        factor = processor.get("rescale_factor", 1 / 255)
        if not isinstance(factor, int | float) or not math.isclose(factor, 1 / 255, rel_tol=1e-3):
            raise InputError(
                f"preprocessor_config.json scales pixels by {factor}, not by 1/255. Give --mean and --std."
            )
        pixels |= {"mean": processor.get("image_mean"), "std": processor.get("image_std")}
        if processor.get("do_normalize") is False:
            pixels |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        resample = processor.get("resample")
        pixels["interpolation"] = dict(enumerate(PILLOW_FILTERS)).get(resample)  # type: ignore[arg-type]
        pixels["size"] = _size(processor.get("size")) if "image_size" not in config else None
    return {key: tuple(v) if isinstance(v, list) else v for key, v in pixels.items() if v is not None}


def _size(value: Any) -> tuple[int, int] | None:
    if isinstance(value, dict):
        height: Any = value.get("height", value.get("shortest_edge"))
        return None if height is None else (height, value.get("width", height))
    return (value, value) if isinstance(value, int) else None


def merged_preprocessing(own: Preprocessing | None, changes: Values) -> Preprocessing | None:
    """The network's own preprocessing with changes, or a new one."""
    if not changes:
        return own
    if own is not None:
        return replace(own, **changes)
    if "size" not in changes:
        raise InputError("This network's preprocessing is unknown: give --size too.")
    return Preprocessing(**changes)
