"""Device, floating-point precision, optimiser and learning-rate schedule of a fit."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

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


def create_optimiser(module: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    if device.type == "cuda":
        options["fused"] = True  # one kernel for all weights
        if recipe.schedule != "one_cycle":  # a captured step reads the rate from the device
            options["lr"] = torch.tensor(recipe.learning_rate, device=device)
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, **options)
    kind = torch.optim.Adam if recipe.optimiser == "adam" else torch.optim.AdamW
    return kind(parameters, capturable=device.type == "cuda", **options)


def create_schedule(optimiser: torch.optim.Optimizer, recipe: Recipe) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Create the one schedule that has a state; `set_rate` computes the others from the step."""
    if recipe.schedule != "one_cycle":
        return None
    return torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )


def set_rate(optimiser: torch.optim.Optimizer, recipe: Recipe, step: int) -> None:
    """Set the learning rate of a step (from 1): constant, or a linear warm-up, then half a cosine down to 0."""
    if recipe.schedule != "cosine":
        return
    warm = max(1, recipe.steps // 10)
    progress = (step - warm) / max(1, recipe.steps - warm)
    share = step / warm if step <= warm else 0.5 * (1 + math.cos(math.pi * progress))
    rate = recipe.learning_rate * share
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
