"""Lightning Fabric for a recipe: its devices and its precision."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mergestream.runtime.errors import InputError
from mergestream.training.recipe import Recipe


def create_fabric(recipe: Recipe) -> Any:
    from lightning.fabric import Fabric

    if recipe.accelerator == "cuda" and torch.cuda.device_count() < recipe.devices:
        raise InputError(
            f"The recipe wants {recipe.devices} CUDA device(s), and this machine has {torch.cuda.device_count()}."
        )
    where: dict[str, Any] = {"accelerator": recipe.accelerator, "devices": recipe.devices}
    several = {"strategy": "ddp_spawn"} if recipe.devices > 1 else {}
    return Fabric(**where, **several, precision=recipe.precision)


@contextmanager
def without_advice() -> Iterator[None]:
    """Lightning tells at every fit which devices it found and what one might set; warnings stay."""
    loggers = [logging.getLogger(name) for name in ("lightning.fabric", "lightning.pytorch", "lightning_utilities")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
