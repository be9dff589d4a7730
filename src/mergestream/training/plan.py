"""What is to be trained: data, network, start, and every setting that is tried at every domain."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergestream.data.datasets import source_of
from mergestream.data.datasets.opening import DataRequest
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import number, one_of, whole_number
from mergestream.runtime.option_text import parse_options
from mergestream.training.recipe import Recipe
from mergestream.training.settings import parse_settings
from mergestream.training.starts import HEAD_INITS

# Views that are flips: those of a data set are part of its training too.
FLIPS = ("hflip", "vflip")


@dataclass(frozen=True)
class TrainPlan:
    """Which data, which network from which weights, and every setting that is tried at every domain."""

    data: DataRequest
    network: str
    settings: tuple[Recipe, ...]
    arguments: tuple[tuple[str, Any], ...] = ()
    init: str = "pretrained"
    head_init: str = "shared"
    domain: str | None = None  # one site alone, from the consortium's base
    keep_candidates: bool = False
    statistics: int = 0  # of so many training images each, for methods that want them
    seed: int = 0
    keep_every: float = 0.0  # seconds of work that a kill may cost, rounded up to the next validation
    tensorboard: bool = False

    def __post_init__(self) -> None:
        one_of("head_init", self.head_init, HEAD_INITS)
        whole_number("statistics", self.statistics, low=0)
        number("keep_every", self.keep_every, low=0)
        if not self.settings:
            raise InputError("There is no setting to train with.")

    @property
    def devices(self) -> int:
        """The most that one fit shares."""
        return max(recipe.devices for recipe in self.settings)

    @property
    def accelerator(self) -> str:
        return "cpu" if all(recipe.accelerator == "cpu" for recipe in self.settings) else "auto"


def plan_from(
    *,
    dataset: str,
    root: Path | None,
    data_options: Sequence[str],
    skip_bad: int,
    allow_missing_classes: bool,
    network: str,
    arguments: Sequence[str],
    init: str,
    settings: str,
    start: Recipe,
    **more: Any,
) -> TrainPlan:
    """A plan as it is written on a command line; `start` is the recipe that the settings differ from."""
    flips = tuple(view for view in source_of(dataset).about.views if view in FLIPS)
    return TrainPlan(
        data=DataRequest(
            dataset,
            None if root is None else str(root.resolve()),
            parse_options(data_options),
            skip_bad=skip_bad,
            allow_missing_classes=allow_missing_classes,
        ),
        network=network,
        settings=parse_settings(settings, replace(start, views=flips)),
        arguments=parse_options(arguments),
        init=init if init in ("pretrained", "random") else str(Path(init).resolve()),
        seed=start.seed,
        **more,
    )
