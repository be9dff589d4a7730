"""What moves the weights: the recipe's optimiser, its schedule, the dropout before the head."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.networks.architecture import Network
from mergestream.training.recipe import Recipe


def create_optimiser(module: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    if device.type == "cuda":
        options["fused"] = True  # one kernel for all weights
        if recipe.schedule != "one_cycle":  # a rate on the device, which a captured step reads anew
            options["lr"] = torch.tensor(recipe.learning_rate, device=device)
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, **options)
    kind = torch.optim.Adam if recipe.optimiser == "adam" else torch.optim.AdamW
    return kind(parameters, capturable=device.type == "cuda", **options)


def create_schedule(optimiser: Any, recipe: Recipe) -> torch.optim.lr_scheduler.LRScheduler | None:
    """A schedule with a state of its own; the others are functions of the step."""
    if recipe.schedule != "one_cycle":
        return None
    return torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )


def set_rate(optimiser: torch.optim.Optimizer, recipe: Recipe, step: int) -> None:
    """The learning rate of a step, from 1: constant, or a linear warm-up and then half a cosine down to 0."""
    if recipe.schedule != "cosine":
        return
    warm = max(1, recipe.steps // 10)
    rest = (step - warm) / max(1, recipe.steps - warm)
    rate = recipe.learning_rate * (step / warm if step <= warm else 0.5 * (1 + math.cos(math.pi * rest)))
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class _Dropped:
    """A hook that drops a share of what reaches the head."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return nn.functional.dropout(given[0], self.share, module.training), *given[1:]


def add_dropout(network: Network, share: float) -> None:
    """Dropout before the head, whatever the network calls it; once, also where a network is fitted again."""
    head = network.module.get_submodule(network.head[0])
    present = any(isinstance(hook, _Dropped) and hook.share == share for hook in head._forward_pre_hooks.values())
    if share and not present:
        head.register_forward_pre_hook(_Dropped(share))
