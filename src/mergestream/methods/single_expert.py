"""One named expert answers everything."""

from typing import ClassVar

from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.methods.base import ExpertLogits, Method
from mergestream.methods.step import Step
from mergestream.pool.expert_pool import ExpertPool


class SingleExpert(Method):
    """expert: its name in the pool."""

    name: ClassVar[str] = "single_expert"
    static: ClassVar[bool] = True

    def __init__(self, pool: ExpertPool, *, expert: str) -> None:
        super().__init__(pool)
        self.expert, self._index = expert, pool.index(expert)
        self._coefficients = simplex.one_hot(self._index, len(pool), pool.device)

    def _step(self, images: Tensor, expert_logits: ExpertLogits) -> Step:
        coefficients = self._coefficients.clone(), self._coefficients.clone()
        if not (expert_logits or self._with_experts):
            return Step(self.pool.expert_logits(self._index, images), *coefficients)
        logits = self._logits(images, expert_logits)
        return Step(logits[self._index], *coefficients, expert_logits=self._asked(logits))

    def _capturable(self) -> bool:
        return True

    def _takes_padding(self) -> bool:
        return True  # every image is answered for itself
