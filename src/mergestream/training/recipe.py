"""Recipes of a fit, named ones, sets of recipes (one, published, or a grid 'dropout=0|0.1'), and plans.

A recipe names every choice; it is checked, and written into the expert's card.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from mergestream.data.datasets import DataRequest, source_of
from mergestream.networks.preprocessing import view_names
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.option_checks import (
    number,
    one_of,
    parse_choices,
    parse_options,
    split_outside_brackets,
    whole_number,
    yes_or_no,
)
from mergestream.training.heads import HEAD_INITS

CHOICES = {
    "optimiser": ("adam", "adamw", "sgd"),
    "schedule": ("constant", "cosine", "one_cycle"),
    "loss": ("plain", "weighted"),
    "criterion": ("plain", "balanced"),
    "accelerator": ("auto", "cpu", "cuda"),
    "precision": ("32-true", "bf16-mixed", "16-mixed"),
    "compile": ("auto", "always", "never"),
}


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of one fit. Defaults as in DomainBed and DiWA: Adam at 5e-5, 5,001 steps of 32, augmented.

    For a pretrained transformer see RECIPES['default'].
    """

    steps: int = 5001
    batch_size: int = 32
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    dropout: float = 0.0  # before the head
    optimiser: str = "adam"
    schedule: str = "constant"  # or cosine (the first tenth of the steps warms up), or one_cycle
    augmentation: float = 1.0  # strength of crop, colour and grey: 0 none, 1 DomainBed's
    views: tuple[str, ...] = ("hflip",)  # label-preserving, each applied to a random half of a batch
    loss: str = "plain"  # or weighted by class, from the training split's counts
    label_smoothing: float = 0.0
    freeze_bn: bool = False  # keep BatchNorm's statistics as the start has them
    criterion: str = "plain"  # validation cross-entropy that chooses the step: mean over images, or balanced
    validate_every: int = 100
    validation_share: float = 0.2
    seed: int = 0
    split_seed: int | None = None  # of the validation split, so that fits of several seeds can share one
    accelerator: str = "auto"
    precision: str = "32-true"
    compile: str = "auto"  # on a CUDA device; the arithmetic is the same, the rounding differs
    threads: int = 1  # on a CPU the number of threads decides the order of sums, and so the exact weights

    @property
    def seed_of_split(self) -> int:
        return self.seed if self.split_seed is None else self.split_seed

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "validate_every", "threads"):
            whole_number(name, getattr(self, name), low=1)
        for name in ("seed", "seed_of_split"):
            whole_number(name, getattr(self, name), low=0)
        number("learning_rate", self.learning_rate, above=0)
        number("weight_decay", self.weight_decay, low=0)
        number("augmentation", self.augmentation, low=0, high=2)
        number("validation_share", self.validation_share, above=0, below=1)
        for name in ("dropout", "label_smoothing"):
            number(name, getattr(self, name), low=0, below=1)
        for name, choices in CHOICES.items():
            one_of(name, getattr(self, name), choices)
        yes_or_no("freeze_bn", self.freeze_bn)
        view_names("views", self.views)


# DiWA's values (Ramé et al. 2022), its default first.
DIWA = {"learning_rate": (5e-5, 3e-5, 1e-5), "dropout": (0.0, 0.1, 0.5), "weight_decay": (1e-6, 1e-4)}
# DomainBed's random ranges for images of 224 pixels (Gulrajani and Lopez-Paz 2021).
DOMAINBED: dict[str, Callable[[np.random.RandomState], Any]] = {
    "learning_rate": lambda random: 10 ** random.uniform(-5, -3.5),
    "weight_decay": lambda random: 10 ** random.uniform(-6, -2),
    "dropout": lambda random: float(random.choice([0.0, 0.1, 0.5])),
    "batch_size": lambda random: int(2 ** random.uniform(3, 5.5)),
}


# Algorithm 2 of the paper names these five options and no values. Ours: DiWA's, two strengths, two optimisers.
PAPER_SWEEP = {**DIWA, "augmentation": (1.0, 0.5), "optimiser": ("adam", "adamw")}
PAPER_SETTINGS = 20  # of the 72 combinations, as many as DiWA and DomainBed try


@dataclass(frozen=True)
class NamedRecipe:
    """What `train --recipe NAME` stands for; options on the command line replace its own."""

    options: Mapping[str, Any]  # of Recipe
    settings: str = "one"
    head_init: str = "shared"


RECIPES = {
    # Keeps what a transformer was pretrained for.
    "default": NamedRecipe(
        {"optimiser": "adamw", "schedule": "cosine", "learning_rate": 3e-5, "weight_decay": 0.05},
    ),
    "paper": NamedRecipe({"steps": 5000}, f"paper:{PAPER_SETTINGS}", "independent"),
    "domainbed": NamedRecipe({}),
}


def start_from(name: str, given: Mapping[str, Any]) -> tuple[Recipe, str, str]:
    """The recipe, settings and head start of a named recipe; whatever is given and not None replaces its own."""
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    named, chosen = RECIPES[name], {key: value for key, value in given.items() if value is not None}
    own = {field.name: chosen[field.name] for field in fields(Recipe) if field.name in chosen}
    settings, head_init = chosen.get("settings", named.settings), chosen.get("head_init", named.head_init)
    return Recipe(**{**named.options, **own}), settings, head_init


def parse_settings(text: str, start: Recipe) -> tuple[Recipe, ...]:
    """Parse 'one', 'diwa', 'paper:20', 'domainbed:20' (the first is `start`) or a grid into recipes like `start`."""
    name, _, count = text.partition(":")
    if name == "one":
        return (start,)
    if name == "diwa":
        return _grid(DIWA, replace(start, freeze_bn=True))
    if name in ("paper", "domainbed") and (not count.isdigit() or int(count) < 1):
        raise InputError(f"Write how many settings to draw, as in '{name}:20'; got '{count}'.")
    if name == "paper":
        every = _grid(PAPER_SWEEP, start)
        # The first is DiWA's default; the same ones at every site, so that no site needs to know of another.
        order = 1 + np.random.RandomState(0).permutation(len(every) - 1)
        return tuple(every[place] for place in (0, *order[: int(count) - 1]))
    if name == "domainbed":
        return (start, *(_drawn(number, start) for number in range(1, int(count))))
    if "=" not in text:
        raise unknown_name("set of settings", text, ("one", "diwa", "paper:20", "domainbed:20", "option=this|that"))
    options = [field.name for field in fields(Recipe)]
    return _grid(dict(parse_choices(item, "training", options) for item in split_outside_brackets(text, ",")), start)


def _grid(choices: Mapping[str, Sequence[Any]], start: Recipe) -> tuple[Recipe, ...]:
    if "seed" in choices:  # losses are comparable only on one validation split
        start = replace(start, split_seed=start.seed_of_split)
    return tuple(dict.fromkeys(replace(start, **dict(zip(choices, each))) for each in product(*choices.values())))  # noqa: B905


def _drawn(number: int, start: Recipe) -> Recipe:
    """A recipe of DomainBed's sweep: each option is drawn with its own seed, the md5 of the arguments' text."""

    def seed(*arguments: Any) -> int:
        return int(hashlib.md5(str(arguments).encode()).hexdigest(), 16) % 2**31  # noqa: S324

    own = seed(number, start.seed)
    draws = {name: draw(np.random.RandomState(seed(own, name))) for name, draw in DOMAINBED.items()}
    return replace(start, **draws)


@dataclass(frozen=True)
class TrainPlan:
    """Data, network, initial weights, and the recipes to try at every domain."""

    data: DataRequest
    network: str
    settings: tuple[Recipe, ...]
    arguments: tuple[tuple[str, Any], ...] = ()
    init: str = "pretrained"
    head_init: str = "shared"
    domain: str | None = None  # only this site, from the consortium's base
    keep_candidates: bool = False
    statistics: int = 0  # training images per expert for Gram and Fisher statistics; 0 measures none
    seed: int = 0
    keep_every: float = 0.0  # seconds between saved states; a kill costs at most this much work
    tensorboard: bool = False
    decoded: str = ""  # folder of the decoded images, for pools that share them; else beside the pool

    def __post_init__(self) -> None:
        one_of("head_init", self.head_init, HEAD_INITS)
        whole_number("statistics", self.statistics, low=0)
        number("keep_every", self.keep_every, low=0)
        if not self.settings:
            raise InputError("There is no setting to train with.")

    @property
    def accelerator(self) -> str:
        return "cpu" if all(recipe.accelerator == "cpu" for recipe in self.settings) else "auto"


def plan_from(
    *,
    data: DataRequest,
    arguments: Sequence[str] | Mapping[str, Any],
    init: str,
    start: Recipe,
    settings: str = "one",
    **more: Any,
) -> TrainPlan:
    """Parse a plan from command-line texts; the settings differ from the recipe `start`."""
    flips = tuple(view for view in source_of(data.name).card.views if view in ("hflip", "vflip"))
    return TrainPlan(
        data=data,
        settings=parse_settings(settings, replace(start, views=flips)),
        arguments=parse_options(arguments),
        init=init if init in ("pretrained", "random") else str(Path(init).resolve()),
        seed=start.seed,
        **more,
    )
