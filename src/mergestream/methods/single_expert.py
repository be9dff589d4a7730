"""One named expert answers everything."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.methods.base import Method
from mergestream.methods.state import State, Step
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.runner import Batch


@dataclass(kw_only=True, eq=False, repr=False)
class SingleExpert(Method[State]):
    """expert: its name in the pool."""

    expert: str

    name: ClassVar[str] = "single_expert"
    static = True
    capturable = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._index = self.pool.index(self.expert)
        self._coefficients = simplex.one_hot(self._index, len(self.pool), self.pool.device)

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:
        if ORIGINAL in batch.expert_logits:
            logits = batch.expert_logits[ORIGINAL][self._index]
            self.pool.passes["expert"] += len(logits)
        else:
            logits = self.pool.expert_logits(self._index, batch.images, preprocessed=True)
        return Step(logits, self._coefficients.clone(), self._coefficients.clone()), state

    def weights(self, state: State) -> Tensor:
        return self.pool.bank[self._index]
