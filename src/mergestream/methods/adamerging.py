"""AdaMerging (Yang et al. 2024), online: lambdas that minimise the entropy of the merged model's own answers."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mergestream.functional import scores as scoring
from mergestream.functional.merging import Rows
from mergestream.methods.base import option
from mergestream.methods.merged_model import MergedState, TaskVectorModel
from mergestream.methods.state import INSEPARABLE
from mergestream.methods.task_arithmetic import add_task_vectors, resolve_lambda
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics.fisher_information import require_gradient
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import number, one_of, whole_number, yes_or_no


@dataclass(frozen=True)
class AdaMergingState(MergedState):
    lambdas: Tensor = field(metadata=INSEPARABLE)  # [K], or [K,L] by tensor
    adam: dict[str, Tensor] = field(metadata=INSEPARABLE)  # Adam's moments of them; empty before the first update


@dataclass(kw_only=True, eq=False, repr=False)
class AdaMerging(TaskVectorModel[AdaMergingState]):
    """On every batch: `steps` updates of the lambdas by Adam on the batch's mean entropy, then the answer.

    With `clamp` a lambda that leaves [0, 1] gets no gradient there, as published.
    """

    name: ClassVar[str] = "adamerging"
    needs = ("base", "gradients")
    learns = True
    granularity: str = option("task", one_of, ("task", "layer"))  # one lambda per expert, or per expert and tensor
    lambda_: float | str = 0.3  # start of the lambdas: a number, or '1/K'
    learning_rate: float = option(1e-3, number, low=0)  # Adam's, with betas 0.9 and 0.999
    steps: int = option(1, whole_number, low=1)
    clamp: bool = option(True, yes_or_no)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._first = resolve_lambda(self.lambda_, len(self.pool), single=True)[0]
        if self.clamp and not 0 <= self._first <= 1:
            message = "With clamp, 'lambda' starts within [0, 1], else it would never move"
            raise InputError(f"{message}; got {self.lambda_!r}.")

    def start_learning(self) -> AdaMergingState:
        experts, tensors = len(self.pool), len(self.pool.layout.parameters)
        shape = (experts,) if self.granularity == "task" else (experts, tensors)
        return AdaMergingState(torch.full(shape, self._first), {})

    def learn(self, images: Tensor, state: AdaMergingState) -> AdaMergingState:
        for _ in range(self.steps):
            state = self._updated(state, self._gradient(images, state))
        return state

    def _updated(self, state: AdaMergingState, gradient: Tensor) -> AdaMergingState:
        """One step of Adam, of which nothing but its moments stays."""
        with torch.inference_mode(False), torch.enable_grad():
            lambdas = nn.Parameter(state.lambdas.clone())
            adam = torch.optim.Adam([lambdas], lr=self.learning_rate)
            if state.adam:
                adam.state[lambdas] = {name: value.clone() for name, value in state.adam.items()}
            self._effective(lambdas).backward(gradient)
            adam.step()
            return replace(state, lambdas=lambdas.detach(), adam=dict(adam.state[lambdas]))

    def _gradient(self, images: Tensor, state: AdaMergingState) -> Tensor:
        """dL/dlambda_kl = <dL/dtheta_l, theta_kl - theta_0l>: one backward pass, one model's gradient in memory."""
        gradients = entropy_gradients(self.pool, self.weights(state), images)
        products = torch.zeros(len(self.pool), len(gradients), device=self.pool.device)  # read back once, at the end
        for column, (entry, gradient) in enumerate(zip(self.pool.layout.parameters, gradients, strict=True)):
            start = self._base[entry.start : entry.stop].float()
            flat = gradient.flatten().float()
            for k, row in enumerate(self._rows.span(entry.start, entry.stop)):
                products[k, column] = torch.dot(row.float() - start, flat)
        products = products.cpu()
        return products.sum(dim=1) if self.granularity == "task" else products

    def _effective(self, lambdas: Tensor) -> Tensor:
        return lambdas.clamp(0, 1) if self.clamp else lambdas * 1

    def merge_parameters(self, state: AdaMergingState, out: Tensor) -> None:
        lambdas = self._effective(state.lambdas)
        if self.granularity == "task":
            add_task_vectors(self._base, self._rows, lambdas.tolist(), out)
            return
        for column, entry in enumerate(self.pool.layout.parameters):
            place, rows = slice(entry.start, entry.end), self._rows.span(entry.start, entry.end)
            layer = Rows(rows, rows[:, :0])
            add_task_vectors(self._base[place], layer, lambdas[:, column].tolist(), out[place])

    def merged_from(self, state: AdaMergingState) -> tuple[Tensor, ...]:
        return (state.lambdas,)

    def report(self, state: AdaMergingState) -> dict[str, Any]:
        return {"lambdas": self._effective(state.lambdas)}


def entropy_gradients(pool: ExpertPool, weights: Tensor, images: Tensor) -> list[Tensor]:
    """d(mean entropy of the answers)/d theta at `weights` [P], for every parameter tensor in the layout's order."""
    module = pool.module_with(weights)
    with torch.inference_mode(False), torch.enable_grad():
        names = [entry.name for entry in pool.layout.parameters]
        parameters = {name: module.get_parameter(name).detach().requires_grad_() for name in names}
        batch = images.clone() if images.is_inference() else images
        logits = pool.logits_with(parameters, batch)
        entropy = scoring.entropy(logits[None].float(), torch.ones(1, device=logits.device)).sum()
        require_gradient(entropy, "'adamerging'")
        pool.passes["backward"] += len(batch)
        return list(torch.autograd.grad(entropy, list(parameters.values()), materialize_grads=True))
