"""Test-time merging by agreement (after T3, Imam et al. 2025): experts near the mean answer weigh more."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.functional import scores as scoring
from mergestream.methods.asked_experts import AskedExperts
from mergestream.methods.base import option
from mergestream.methods.state import COEFFICIENTS, State, Step
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import number, yes_or_no


@dataclass(frozen=True)
class T3State(State):
    coefficients: Tensor = field(metadata=COEFFICIENTS)  # of the last batch [K]


@dataclass(kw_only=True, eq=False, repr=False)
class T3JS(AskedExperts[T3State]):
    """lambda_k proportional to exp(-gamma JS(p_k || mean of p)), JS in nats and averaged over the batch."""

    name: ClassVar[str] = "t3_js"
    capturable = True
    gamma: float = option(0.5, number, low=0)  # the two-model paper's
    recalibrate_bn: bool = option(False, yes_or_no)  # BatchNorm statistics from the batch, with one more forward

    def __post_init__(self) -> None:
        super().__post_init__()
        self.takes_padding = self.weights_follow_state = not self.recalibrate_bn

    def start(self) -> T3State:
        return T3State(simplex.uniform(len(self.pool), self.pool.device))

    def advance(self, batch: Batch, state: T3State) -> tuple[Step, T3State]:
        logits = self.ask(batch)
        scores = scoring.divergence(self._seen.filled(logits), self._temperature, batch.shares)
        state = T3State(simplex.softmax(scores, self.gamma))
        answer = self.pool.forward(self.merged(state), batch.images, recalibrate_bn=self.recalibrate_bn)
        entropy = self._seen.score("entropy")(logits, self._temperature, batch.shares)
        coefficients = state.coefficients.clone(), state.coefficients.clone()
        return Step(answer, *coefficients, entropy=entropy, scores=scores), state

    def merged_from(self, state: T3State) -> tuple[Tensor, ...]:
        return (state.coefficients,)

    def merge_into(self, state: T3State, out: Tensor) -> None:
        self.pool.merge(state.coefficients, out=out)

    def weights(self, state: T3State) -> Tensor:
        return self.merged(state)
