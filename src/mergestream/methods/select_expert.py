"""For every batch, the expert that is least uncertain about it answers alone."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from mergestream.functional import coefficients as simplex
from mergestream.functional import scores as scoring
from mergestream.methods.asked_experts import AskedExperts
from mergestream.methods.base import option
from mergestream.methods.state import State, Step
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import one_of


@dataclass(kw_only=True, eq=False, repr=False)
class SelectExpert(AskedExperts[State]):
    """temperature and score as in `entropy_adaptive`; exact ties go to the first name in the alphabet."""

    score: str = option("entropy", one_of, tuple(scoring.SCORES))

    name: ClassVar[str] = "select_expert"
    capturable = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._score, self._entropy = self._seen.score(self.score), self._seen.score("entropy")
        ranks = [sorted(self.pool.names).index(name) for name in self.pool.names]
        self._rank = torch.tensor(ranks, dtype=torch.float32, device=self.pool.device)

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        logits = self.ask(batch)
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
