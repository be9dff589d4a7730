"""Sets of recipes to try: one, a published set, or a grid written as 'learning_rate=1e-5|5e-5, dropout=0|0.1'."""

import hashlib
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np

from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.option_text import parse_value, split_outside_brackets
from mergestream.training.recipe import Recipe

# DiWA's values (Ramé et al. 2022), its default first.
DIWA = {
    "learning_rate": (5e-5, 3e-5, 1e-5),
    "dropout": (0.0, 0.1, 0.5),
    "weight_decay": (1e-6, 1e-4),
}
# DomainBed's random ranges for images of 224 pixels (Gulrajani and Lopez-Paz 2021).
DOMAINBED: dict[str, Callable[[np.random.RandomState], Any]] = {
    "learning_rate": lambda random: 10 ** random.uniform(-5, -3.5),
    "weight_decay": lambda random: 10 ** random.uniform(-6, -2),
    "dropout": lambda random: float(random.choice([0.0, 0.1, 0.5])),
    "batch_size": lambda random: int(2 ** random.uniform(3, 5.5)),
}


def parse_settings(text: str, start: Recipe) -> tuple[Recipe, ...]:
    """Parse 'one', 'diwa', 'domainbed:20' (the first is `start`) or a grid into recipes that differ from `start`."""
    name, _, count = text.partition(":")
    if name == "one":
        return (start,)
    if name == "diwa":
        return _grid({option: list(values) for option, values in DIWA.items()}, replace(start, freeze_bn=True))
    if name == "domainbed":
        return _random_search(_parse_count(count), start)
    if "=" not in text:
        raise unknown_name("set of settings", text, ("one", "diwa", "domainbed:20", "option=this|that"))
    return _grid(dict(_parse_values(item) for item in split_outside_brackets(text, ",")), start)


def _parse_values(item: str) -> tuple[str, list[Any]]:
    name, _, values = item.partition("=")
    options = [field.name for field in fields(Recipe)]
    if name.strip() not in options:
        raise unknown_name("option of training", name.strip(), options)
    parsed = [parse_value(value) for value in split_outside_brackets(values, "|")]
    if not parsed:
        raise InputError(f"The option '{name.strip()}' has no value.")
    return name.strip(), parsed


def _grid(choices: dict[str, list[Any]], start: Recipe) -> tuple[Recipe, ...]:
    if "seed" in choices:  # losses are comparable only on one validation split
        start = replace(start, split_seed=start.seed_of_split)
    return tuple(dict.fromkeys(replace(start, **dict(zip(choices, each))) for each in product(*choices.values())))  # noqa: B905


def _random_search(count: int, start: Recipe) -> tuple[Recipe, ...]:
    """DomainBed's sweep: the first recipe is `start`; in the others each option is drawn with its own seed."""

    def draw_recipe(number: int) -> Recipe:
        draws = {name: draw(_random(number, start.seed, name)) for name, draw in DOMAINBED.items()}
        return replace(start, **draws)

    return (start, *(draw_recipe(number) for number in range(1, count)))


def _random(hparams_seed: int, trial_seed: int, name: str) -> np.random.RandomState:
    return np.random.RandomState(_seed_hash(_seed_hash(hparams_seed, trial_seed), name))


def _seed_hash(*arguments: Any) -> int:
    """DomainBed's seed: the md5 of the arguments' text."""
    return int(hashlib.md5(str(arguments).encode()).hexdigest(), 16) % 2**31  # noqa: S324


def _parse_count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"Write how many settings to draw, as in 'domainbed:20'; got '{text}'.")
    return int(text)
