"""For every batch, the expert that is least uncertain about it answers alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mergestream.functional import coefficients as simplex
from mergestream.functional import scores as scoring
from mergestream.methods.base import Method, option
from mergestream.methods.card_values import resolve_temperature
from mergestream.methods.seen_classes import SeenClasses
from mergestream.methods.state import State, Step
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import one_of


@dataclass(kw_only=True, eq=False, repr=False)
class SelectExpert(Method[State]):
    """temperature and score as in `entropy_adaptive`; exact ties go to the first name in the alphabet."""

    temperature: float | Sequence[float] | str = 1.0
    score: str = option("entropy", one_of, tuple(scoring.SCORES))

    name: ClassVar[str] = "select_expert"
    capturable = True
    asks_experts = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._temperature = resolve_temperature(self.temperature, self.pool)
        self._seen = SeenClasses.of(self.pool)
        self._score, self._entropy = self._seen.score(self.score), self._seen.score("entropy")
        ranks = [sorted(self.pool.names).index(name) for name in self.pool.names]
        self._rank = torch.tensor(ranks, dtype=torch.float32, device=self.pool.device)

    def card_values(self) -> dict[str, Any]:
        own = {"temperature": self._temperature.tolist()} if isinstance(self.temperature, str) else {}
        return {**own, **self._seen.card_values()}

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        logits = self.pool.logits_of_views(batch)[ORIGINAL]
        scores = self._score(logits, self._temperature, batch.shares)
        entropy = scores if self.score == "entropy" else self._entropy(logits, self._temperature, batch.shares)
        # By name, not by position: the order of experts must not decide.
        chosen = torch.where(scores == scores.min(), self._rank, torch.inf).argmin()
        coefficients = simplex.one_hot(chosen, len(scores), scores.device)
        step = Step(
            torch.index_select(logits, 0, chosen.reshape(1)).squeeze(0),
            encoder_coefficients=coefficients,
            head_coefficients=coefficients.clone(),
            entropy=entropy,
            scores=scores,
            head_expert_index=chosen,
        )
        return step, state
