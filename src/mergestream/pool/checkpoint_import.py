"""Import of a checkpoint of timm, torchvision, Hugging Face, MONAI or a plain state dict as an expert folder.

Only local files are read, and no code in a pickle runs.
"""

import json
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.networks.architecture import Architecture, Network, find_head, from_architecture, from_module
from mergestream.networks.flat_layout import Layout, require_names
from mergestream.networks.preprocessing import PILLOW_FILTERS, Preprocessing
from mergestream.pool.checkpoint import WeightsFile, write_expert
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.parts import require_classes
from mergestream.pool.pool_folder import require_new_folder
from mergestream.runtime.errors import CheckpointError, InputError, MissingPathError
from mergestream.runtime.files import json_round_trip, sha256_of_file
from mergestream.runtime.option_checks import parse_numbers, parse_options

# Keys under which trainers store the weights, and prefixes of tensor names; the likeliest first.
WRAPPERS = ("state_dict", "model_state_dict", "model", "network", "net")
PREFIXES = ("module.", "model.", "network.", "net.", "_orig_mod.")
IN_FOLDERS = ("model.safetensors", "pytorch_model.bin")
# Entries of a Hugging Face configuration that are not arguments of the network; nor are those that start with '_'.
NOT_ARGUMENTS = (
    "architectures", "auto_map", "transformers_version", "model_type", "name_or_path", "torch_dtype", "dtype",
    "num_labels", "id2label", "label2id",
)  # fmt: skip
HINT = "Check --network and --arg; leave out what is no part of the network (a loss, a metric): --ignore {prefix}."
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

    `pixels` (size, mean, std, interpolation) overrides the preprocessing recorded with the network.
    """
    require_new_folder(out)
    path = _checkpoint_file(file)
    tensors = dict(WeightsFile(path)) if path.suffix == ".safetensors" else _state_in(_unpickled(path), path)
    config = _read_config(path, "config.json")
    most = sum(tensor.numel() for tensor in tensors.values())
    built = _network(network, tuple(classes), config, dict(arguments or {}), most)
    built = replace(built, head=find_head(built.module, head)) if head else built
    recorded = {**_pixel_config(config, _read_config(path, "preprocessor_config.json")), **(pixels or {})}
    built = replace(built, preprocessing=_merged_preprocessing(built.preprocessing, recorded))
    require_classes(classes, built)
    state = _fitted(tensors, path, built, ignore)
    recipe = {"imported": {"sha256": sha256_of_file(path), "kind": path.suffix.lstrip(".")}}
    card = ExpertCard.for_network(out.name, built, tuple(classes), domain=domain, recipe=recipe)
    return write_expert(out, state, card)


def network_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse 'img_size=126' into names and values, with the same syntax as options."""
    try:
        # JSON has no tuples: use the values as they will be read back from the card.
        return json_round_trip(dict(parse_options(pairs)))
    except InputError as error:
        raise InputError(f"--arg is NAME=VALUE, as in img_size=126. {error}") from None


def pixel_options(size: int | None, mean: str | None, std: str | None, interpolation: str | None) -> dict[str, Any]:
    """The preprocessing options given on the command line."""
    channels = {"mean": parse_numbers("--mean", mean), "std": parse_numbers("--std", std)}
    given = {"size": size and (size, size), **channels, "interpolation": interpolation}
    return {key: value for key, value in given.items() if value is not None}


def _checkpoint_file(given: Path) -> Path:
    """The checkpoint's file: the given one, or the usual one in a Hugging Face folder."""
    if given.is_file():
        return given
    if not given.is_dir():
        raise MissingPathError(f"There is no file {given}. Checkpoints are read from this machine, never downloaded.")
    files = [given / name for name in IN_FOLDERS if (given / name).is_file()]
    if not files:
        raise CheckpointError(f"{given} holds neither {' nor '.join(IN_FOLDERS)}. Name the checkpoint's file itself.")
    return files[0]


def _unpickled(path: Path) -> Any:
    """Load tensors and plain containers; torch's weights-only reader refuses everything that could run code."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile file can fail in any way
        # torch's own message explains how to switch the protection off, so it is not shown.
        culprit = re.search(r"GLOBAL ([\w.]+)|(?:global|[Cc]lass) ([\w.]+)", str(error))
        what = f"it holds {culprit.group(1) or culprit.group(2)}" if culprit else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read without running code in it ({what}). If you trust it, save its weights "
            f"alone: torch.save(network.state_dict(), FILE)."
        ) from error


def _state_in(value: Any, path: Path) -> dict[str, Tensor]:
    """Find the state dict inside the usual wrappers; Lightning's is under 'state_dict'."""
    for _ in range(3):
        wrappers = WRAPPERS if isinstance(value, Mapping) else ()
        value = next((value[key] for key in wrappers if isinstance(value.get(key), Mapping)), value)
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{path} holds no state dict: it is {type(value).__name__}. Save network.state_dict().")
    odd = ", ".join([name for name, tensor in value.items() if not isinstance(tensor, Tensor)][:5])
    if odd:
        raise CheckpointError(f"{path} holds no plain state dict: {odd} are not tensors. Save network.state_dict().")
    return dict(value)


def _fitted(tensors: Mapping[str, Tensor], path: Path, network: Network, ignore: Sequence[str]) -> dict[str, Tensor]:
    """Put the file's tensors into the network's order; refuse wrong names, shapes, types or numbers."""
    layout = Layout.of(network.module, network.head)
    tensors = _without_prefixes(tensors, layout.allowed_names, ignore, path)
    if network.architecture.library == "transformers" and not layout.required_names <= set(tensors):
        tensors = _with_current_names(network.module, tensors, path)
    kinds = sorted({tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}, key=str)
    row = torch.empty(layout.size, dtype=reduce(torch.promote_types, kinds, kinds[0] if kinds else torch.float32))
    integers = layout.write_row(tensors, row, str(path), HINT)
    return {**layout.views(row), **integers}


def _without_prefixes(
    tensors: Mapping[str, Tensor], needed: Collection[str], ignore: Sequence[str], where: Path
) -> dict[str, Tensor]:
    """Remove wrappers' prefixes from the names, and the tensors that the user ignores."""
    for prefix in ignore:
        if not prefix or not any(name.startswith(prefix) for name in tensors):
            raise InputError(f"--ignore {prefix}: no tensor in {where} has this prefix.")
    named = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(ignore) or ("\0",))}
    while not set(named) & set(needed):
        common = [p for p in PREFIXES if 2 * sum(name.startswith(p) for name in named) > len(named)]
        if not common:
            break
        named = {name.removeprefix(common[0]): tensor for name, tensor in named.items()}
    return named


def _with_current_names(module: nn.Module, tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Let transformers read a file's tensors into this network; refuse a file of which it would leave something out."""
    network: Any = type(module)
    with _quiet():
        try:
            loaded, report = network.from_pretrained(
                None, config=module.config, state_dict=dict(tensors), output_loading_info=True
            )
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{where} does not fit the network: shapes differ. Check --classes and --arg."
            ) from error
    missing, odd = (set(report[key]) for key in ("missing_keys", "unexpected_keys"))
    state: dict[str, Tensor] = loaded.state_dict()
    require_names((set(state) - missing) | odd, set(state), set(state), str(where), HINT)
    # Tensors that transformers skips by its own rules are in neither list.
    counts = [sum(tensor.numel() for tensor in each.values()) for each in (tensors, state)]
    if counts[0] != counts[1]:
        raise CheckpointError(
            f"{where} holds {counts[0]:,} numbers, the network {counts[1]:,}: some would be left out."
        )
    return state


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and reports."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _read_config(path: Path, name: str) -> dict[str, Any]:
    """Read a configuration file beside the weights; empty if there is none."""
    file = path.with_name(name)
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON ({error}).") from error
    return value if isinstance(value, dict) else {}


def _network(name: str, classes: tuple[str, ...], config: Values, arguments: Values, most: int) -> Network:
    """Build by timm name, 'torchvision:NAME', 'transformers:CLASS' or 'monai:CLASS'; `config` lies by the weights."""
    library, _, rest = name.rpartition(":")
    if library == "transformers":
        labels = config.get("id2label")
        recorded = [str(label) for label in labels.values()] if isinstance(labels, dict) else []
        if sorted(recorded) == sorted(classes) and tuple(recorded) != classes:
            raise InputError(f"config.json has the classes in another order: {', '.join(recorded)}. Use that order.")
        own = {key: v for key, v in config.items() if key not in NOT_ARGUMENTS and not key.startswith("_")}
        named = {"id2label": dict(enumerate(classes)), "label2id": {label: i for i, label in enumerate(classes)}}
        # Described from the module, so that its card equals that of the same network built in Python.
        return from_module(Architecture(library, rest, {**own, **arguments, **named}).build(most).eval())
    recorded_name = config.get("architecture")
    if isinstance(recorded_name, str) and recorded_name != rest.split(".")[0]:
        raise InputError(f"config.json beside the weights says they are of {recorded_name[:100]!r}, not '{rest}'.")
    listed = config.get("model_args")
    own = listed if isinstance(listed, dict) else {}
    architecture = Architecture(library or "timm", rest, {**own, **arguments, "num_classes": len(classes)})
    return from_architecture(architecture, most)


def _pixel_config(config: Values, processor: Values) -> dict[str, Any]:
    """The preprocessing in timm's configuration or Hugging Face's processor."""
    own = config.get("pretrained_cfg")
    pixels = {key: own.get(key) for key in ("mean", "std", "interpolation")} if isinstance(own, dict) else {}
    if processor:
        factor = processor.get("rescale_factor", 1 / 255)
        if not isinstance(factor, int | float) or not math.isclose(factor, 1 / 255, rel_tol=1e-3):
            raise InputError(
                f"preprocessor_config.json scales pixels by {factor!r:.100}, not by 1/255. Give --mean and --std."
            )
        pixels |= {"mean": processor.get("image_mean"), "std": processor.get("image_std")}
        if processor.get("do_normalize") is False:
            pixels |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        resample = processor.get("resample")
        number = resample if isinstance(resample, int) else -1
        pixels["interpolation"] = PILLOW_FILTERS[number] if 0 <= number < len(PILLOW_FILTERS) else None
        pixels["size"] = _size(processor.get("size")) if "image_size" not in config else None
    return {key: tuple(v) if isinstance(v, list) else v for key, v in pixels.items() if v is not None}


def _size(value: Any) -> tuple[int, int] | None:
    if isinstance(value, dict):
        height: Any = value.get("height", value.get("shortest_edge"))
        return None if height is None else (height, value.get("width", height))
    return (value, value) if isinstance(value, int) else None


def _merged_preprocessing(own: Preprocessing | None, changes: Values) -> Preprocessing | None:
    """The network's own preprocessing with changes, or a new one."""
    if not changes:
        return own
    if own is not None:
        return replace(own, **changes)
    if "size" not in changes:
        raise InputError("This network's preprocessing is unknown: give --size too.")
    return Preprocessing(**changes)
