"""The plan of a training run: data, network, initial weights, and the recipes to try at every domain."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergestream.data.datasets import source_of
from mergestream.data.datasets.data_request import DataRequest
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import number, one_of, whole_number
from mergestream.runtime.option_text import parse_options
from mergestream.training.heads import HEAD_INITS
from mergestream.training.recipe import Recipe, parse_settings

# Views of a data set that training applies too.
FLIPS = ("hflip", "vflip")


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
    """Parse a plan from command-line texts; the settings differ from the recipe `start`."""
    flips = tuple(view for view in source_of(dataset).card.views if view in FLIPS)
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
