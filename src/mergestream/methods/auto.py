"""The method that suits the pool: the one that 'mergestream choose' recommends for its experts, or the default rule."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from mergestream.methods.base import Method, option
from mergestream.methods.recommendation import DEFAULT, FEWEST_SITES, ChoiceEvidence, choose, hashes_of, sites_of
from mergestream.methods.spelling import BASE_OPTION, Variant, default_base, parse_variant
from mergestream.methods.state import State, Step
from mergestream.networks.preprocessing import view_names
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import MergestreamError, PoolError
from mergestream.runtime.messages import log_once

_log = logging.getLogger(__name__)
POOL, USUAL_VIEWS = "pool", ("hflip",)


@dataclass(kw_only=True, eq=False, repr=False)
class Auto(Method[Any]):
    """A shell around the chosen method. Its options hold the choice, so that logs and runs name what answered."""

    name: ClassVar[str] = "auto"
    choice: str = POOL  # 'pool': as pool.json recommends for these experts; or a method, as tables write it
    views: Sequence[str] = option(USUAL_VIEWS, view_names)  # of the chosen method, where its text names none

    def __post_init__(self) -> None:
        self._from_pool = self.choice == POOL
        text = recommended_method(self.pool) if self._from_pool else self.choice
        try:
            chosen = self._chosen = _create(text, self.pool, self.views)
        except MergestreamError as error:
            if not self._from_pool:
                raise
            raise PoolError(f"The recommendation in pool.json cannot be used: {error}") from error
        super().__post_init__()
        self.choice, self.views = text, chosen.asked_views()
        self.needs, self.static, self.asks_experts = chosen.needs, chosen.static, chosen.asks_experts
        self.corrects_mix = chosen.corrects_mix
        self.capturable, self.takes_padding, self.period = chosen.capturable, chosen.takes_padding, chosen.period

    def label(self) -> str:
        return self.name if self._from_pool else f"{self.name}(choice={self.choice})"

    def start(self) -> State:
        return self._chosen.start()  # type: ignore[no-any-return]

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        return self._chosen.advance(batch, state)

    def weights(self, state: State) -> Tensor | None:
        return self._chosen.weights(state)

    def wrapped(self) -> dict[str, Any]:
        described = self._chosen.provenance
        return {key: described[key] for key in ("method", "revision", "options", "wrapped") if key in described}

    def card_values(self) -> dict[str, Any]:
        return self._chosen.card_values()

    def source_hashes(self) -> dict[str, str]:
        return self._chosen.source_hashes()

    # --- the merged weights at hand are the chosen method's ---------------------------------------------------

    @property
    def held_from(self) -> tuple[Tensor, ...] | None:
        return self._chosen.held_from

    @held_from.setter
    def held_from(self, source: tuple[Tensor, ...] | None) -> None:
        self._chosen.held_from = source

    @property
    def reuses_weights(self) -> bool:
        return self._chosen.reuses_weights

    def merged_from(self, state: State) -> tuple[Tensor, ...]:
        return self._chosen.merged_from(state)

    def merged(self, state: State) -> Tensor:
        return self._chosen.merged(state)


def recommended_method(pool: ExpertPool) -> str:
    """The method for exactly these experts, as text.

    Where some experts of the recommendation are left out, the rule of choice is applied again, to the parts that
    neither their images nor their weights are in. Without such parts the default rule answers.
    """
    value = pool.recommendation
    if value is None:
        return DEFAULT
    if value["experts"] == hashes_of(pool.cards):
        return str(value["method"])
    if len(sites_of(pool.cards)) < FEWEST_SITES:
        return DEFAULT
    evidence = ChoiceEvidence.from_json(value)
    parts = evidence.parts_for(pool.cards)
    if parts:
        return choose(evidence, parts).method
    experts = ", ".join(pool.names)
    message = (
        f"pool.json has no recommendation for exactly the experts {experts}: 'auto' is '{DEFAULT}'. Run 'mergestream "
        f"choose' again; for pools that leave one site out, with --nested."
    )
    log_once(_log, logging.WARNING, message)
    return DEFAULT


def _create(text: str, pool: ExpertPool, views: Sequence[str]) -> Method[Any]:
    """A method from its text, with these views where it takes views by default and the text names none."""
    from mergestream.methods import create_method  # the table holds this method too

    variant = parse_variant(text, inside=Auto.name)
    options = dict(variant.options) if tuple(views) == USUAL_VIEWS else _with_views(variant, views)
    return create_method(variant.method, pool, **options)


def _with_views(variant: Variant, views: Sequence[str]) -> dict[str, Any]:
    """Options of a method, and of its base, with other views than by default."""
    from mergestream.methods import METHODS

    options = dict(variant.options)
    if (usual := default_base(variant.method)) is not None:
        base = parse_variant(options.get(BASE_OPTION, usual))
        inner = _with_views(base, views)
        if BASE_OPTION not in options and inner.get("views"):
            inner["views"] = tuple(views)
        options[BASE_OPTION] = str(Variant(base.method, tuple(inner.items())))
    elif "views" in (own := METHODS[variant.method]._parameters()) and own["views"].default:
        options.setdefault("views", tuple(views))
    return options
