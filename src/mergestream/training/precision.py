"""Device and floating-point precision of a fit."""

from contextlib import AbstractContextManager, nullcontext

import torch

from mergestream.runtime.errors import InputError
from mergestream.training.recipe import Recipe

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def choose_device(recipe: Recipe) -> torch.device:
    """Return the recipe's device; 'auto' takes a CUDA device if there is one."""
    available = torch.cuda.is_available()
    if recipe.accelerator == "cuda" and not available:
        raise InputError("The recipe needs a CUDA device, and this machine has none.")
    device = torch.device("cuda" if available and recipe.accelerator != "cpu" else "cpu")
    if recipe.precision == "16-mixed" and device.type == "cpu":
        raise InputError("precision='16-mixed' needs a CUDA device; on a CPU use 32-true or bf16-mixed.")
    return device


def autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager[object]:
    """Return the block in which forward passes run: weights stay float32, mixed precision casts what gains from it."""
    dtype = AUTOCAST.get(recipe.precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def create_scaler(recipe: Recipe, device: torch.device) -> torch.amp.GradScaler:
    """Create the loss scale that float16 gradients need; at other precisions it passes everything through."""
    return torch.amp.GradScaler(device.type, enabled=recipe.precision == "16-mixed")
