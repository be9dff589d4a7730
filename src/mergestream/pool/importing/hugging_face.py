"""Names of tensors in Hugging Face's files: older than those in its networks, and known to its own reader only."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mergestream.pool.importing.foreign_checkpoint import require_names
from mergestream.runtime.errors import CheckpointError


def with_current_names(module: nn.Module, tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """A file's tensors as transformers itself reads them into this network; what it would leave out is refused."""
    network: Any = type(module)
    with _quiet():
        try:
            read, report = network.from_pretrained(
                None, config=module.config, state_dict=dict(tensors), output_loading_info=True
            )
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{where} does not fit the network: shapes differ. Check --classes and --arg."
            ) from error
    missing, odd = (set(report[key]) for key in ("missing_keys", "unexpected_keys"))
    state: dict[str, Tensor] = read.state_dict()
    require_names((set(state) - missing) | odd, set(state), set(state), where)
    # Tensors that transformers itself is told to skip are in neither list.
    counts = [sum(tensor.numel() for tensor in each.values()) for each in (tensors, state)]
    if counts[0] != counts[1]:
        raise CheckpointError(
            f"{where} holds {counts[0]:,} numbers, the network {counts[1]:,}: some would be left out."
        )
    return state


@contextmanager
def _quiet() -> Iterator[None]:
    """Its bars and reports would go between our one-line errors."""
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
