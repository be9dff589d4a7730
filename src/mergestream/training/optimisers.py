"""What moves the weights: the recipe's optimiser, its schedule, the dropout before the head."""

from typing import Any

import torch
from torch import nn

from mergestream.networks import Network
from mergestream.training.recipe import Recipe


def create_optimiser(module: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    if device.type == "cuda":
        options["fused"] = True  # one kernel for all weights
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, **options)
    kind = torch.optim.Adam if recipe.optimiser == "adam" else torch.optim.AdamW
    return kind(parameters, capturable=device.type == "cuda", **options)


def create_schedule(optimiser: Any, recipe: Recipe) -> torch.optim.lr_scheduler.LRScheduler | None:
    if recipe.schedule == "constant":
        return None
    return torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )


def add_dropout(network: Network, share: float) -> None:
    """Dropout before the head, whatever the network calls it."""

    def dropped(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return nn.functional.dropout(given[0], share, module.training), *given[1:]

    if share:
        network.module.get_submodule(network.head[0]).register_forward_pre_hook(dropped)
