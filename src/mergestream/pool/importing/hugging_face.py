"""Tensor names in older Hugging Face files, which only transformers itself can translate."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mergestream.pool.importing.foreign_checkpoint import require_names
from mergestream.runtime.errors import CheckpointError


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
