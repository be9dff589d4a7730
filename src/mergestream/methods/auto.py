"""The method that suits the pool: the one that 'mergestream choose' recommends for its experts, or the default rule."""

import logging
from dataclasses import dataclass, field
from typing import ClassVar

from mergestream.methods.recommendation import DEFAULT, FEWEST_SITES, ChoiceEvidence, choose, hashes_of, sites_of
from mergestream.methods.state import Step
from mergestream.methods.wrapper import Wrapper, WrapperState
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import MergestreamError, PoolError
from mergestream.runtime.messages import log_once

_log = logging.getLogger(__name__)
POOL = "pool"


@dataclass(kw_only=True, eq=False, repr=False)
class Auto(Wrapper[WrapperState]):
    """A shell around the chosen method. Its options hold the choice, so that logs and runs name what answered."""

    name: ClassVar[str] = "auto"
    base: str = field(default=DEFAULT, init=False)
    choice: str = POOL  # 'pool': as pool.json recommends for these experts; or a method, as tables write it
    default: str = DEFAULT  # the method where pool.json recommends none for these experts

    def __post_init__(self) -> None:
        self._from_pool = self.choice == POOL
        self.base = (recommended_method(self.pool) or self.default) if self._from_pool else self.choice
        try:
            super().__post_init__()
        except MergestreamError as error:
            if not self._from_pool:
                raise
            raise PoolError(f"The recommendation in pool.json cannot be used: {error}") from error
        # What was not chosen is part of no record.
        self.choice, self.default, self.static = self.base, DEFAULT, self._base.static

    def label(self) -> str:
        return self.name if self._from_pool else f"{self.name}(choice={self.choice})"

    def advance(self, batch: Batch, state: WrapperState) -> tuple[Step, WrapperState]:
        step, base = self._base.advance(batch, state.base)
        return step, WrapperState(base)


def recommended_method(pool: ExpertPool) -> str | None:
    """The method for exactly these experts, as text; None where there is no recommendation for them.

    Where some experts of the recommendation are left out, the rule of choice is applied again, to the parts that
    neither their images nor their weights are in.
    """
    value = pool.recommendation
    if value is None:
        return None
    if value["experts"] == hashes_of(pool.cards):
        return str(value["method"])
    if len(sites_of(pool.cards)) < FEWEST_SITES:
        return None
    evidence = ChoiceEvidence.from_json(value)
    if parts := evidence.parts_for(pool.cards):
        return choose(evidence, parts).method
    message = (
        f"pool.json has no recommendation for exactly the experts {', '.join(pool.names)}: 'auto' is the default rule. "
        f"Run 'mergestream choose' again; for pools that leave one site out, with --nested."
    )
    log_once(_log, logging.WARNING, message)
    return None
