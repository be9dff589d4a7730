"""Tensors of a foreign checkpoint by name. Local files only; no code in a pickle runs."""

import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.pool.checkpoint import WeightsFile
from mergestream.runtime.errors import CheckpointError, InputError

# Keys under which trainers store the weights, and prefixes of tensor names; the likeliest first.
WRAPPERS = ("state_dict", "model_state_dict", "model", "network", "net")
PREFIXES = ("module.", "model.", "network.", "net.", "_orig_mod.")
IN_FOLDERS = ("model.safetensors", "pytorch_model.bin")


def foreign_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors or a PyTorch file."""
    return dict(WeightsFile(path)) if path.suffix == ".safetensors" else _state_in(_unpickled(path), path)


def foreign_file(given: Path) -> Path:
    """The checkpoint's file: the given one, or the usual one in a Hugging Face folder."""
    if given.is_file():
        return given
    if not given.is_dir():
        raise CheckpointError(f"There is no file {given}. Checkpoints are read from this machine, never downloaded.")
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
    odd = [name for name, tensor in value.items() if not isinstance(tensor, Tensor)]
    if odd:
        shown = ", ".join(map(str, odd[:5]))
        raise CheckpointError(f"{path} holds no plain state dict: {shown} are not tensors. Save network.state_dict().")
    return dict(value)


def without_prefixes(
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


def require_names(names: Collection[str], needed: Collection[str], allowed: Collection[str], where: Path) -> None:
    """Refuse a file with missing or unexpected tensors, and name them."""
    missing, odd = sorted(set(needed) - set(names)), sorted(set(names) - set(allowed))
    if missing or odd:
        misfits = [f"{verb} {_some(some)}" for verb, some in (("lacks", missing), ("has unexpected", odd)) if some]
        hint = (
            "Check --network and --arg."
            if missing
            else f"If it is not part of the network (a loss, a metric), leave it out: --ignore {odd[0].split('.')[0]}."
        )
        raise CheckpointError(f"{where} does not fit the network: it {' and '.join(misfits)}. {hint}")


def _some(names: Sequence[str], shown: int = 8) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{len(names)} tensor(s), {', '.join(names[:shown])}{rest}"


def with_current_names(module: nn.Module, tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
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
    require_names((set(state) - missing) | odd, set(state), set(state), where)
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
