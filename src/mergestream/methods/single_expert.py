"""One named expert answers everything."""

from typing import ClassVar

from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.methods.base import Method
from mergestream.methods.state import State
from mergestream.methods.step import Step
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import Batch


class SingleExpert(Method[State]):
    """expert: its name in the pool."""

    name: ClassVar[str] = "single_expert"
    static = True
    capturable = True

    def __init__(self, pool: ExpertPool, *, expert: str) -> None:
        super().__init__(pool)
        self.expert, self._index = expert, pool.index(expert)
        self._coefficients = simplex.one_hot(self._index, len(pool), pool.device)

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        if ORIGINAL in batch.expert_logits:
            logits = self.pool.logits_of_views(batch)[ORIGINAL][self._index]
        else:
            logits = self.pool.expert_logits(self._index, batch.images)
        return Step(logits, self._coefficients.clone(), self._coefficients.clone()), state

    def weights(self, state: State) -> Tensor:
        return self.pool.bank[self._index]
