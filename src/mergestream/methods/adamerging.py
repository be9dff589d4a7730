"""AdaMerging (Yang et al. 2024), online: lambdas that minimise the entropy of the merged model's own answers."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mergestream.functional import scores as scoring
from mergestream.functional.merging import Rows
from mergestream.methods.choices import resolve_lambda
from mergestream.methods.merged import MergedModel, base_of
from mergestream.methods.task_arithmetic import add_task_vectors
from mergestream.networks.architecture import logits_of
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, NetworkError
from mergestream.runtime.option_checks import number, one_of, whole_number, yes_or_no


class AdaMerging(MergedModel):
    """On every batch: `steps` updates of the lambdas by Adam on the batch's mean entropy, then the answer.

    granularity     'task': one lambda per expert; 'layer': one per expert and parameter tensor
    lambda          where they start: a number, or '1/K'
    learning_rate   Adam's, with betas 0.9 and 0.999
    clamp           use lambdas clamped to [0, 1]; one that leaves the interval gets no gradient there, as published
    base_head       'saved', or 'zero' for experts whose heads did not start together
    """

    name: ClassVar[str] = "adamerging"
    needs: ClassVar[tuple[str, ...]] = ("base", "gradients")
    _lambdas: nn.Parameter  # [K], or [K,L] by tensor
    _adam: torch.optim.Adam

    def __init__(
        self,
        pool: ExpertPool,
        *,
        granularity: str = "task",
        lambda_: float | str = 0.3,
        learning_rate: float = 1e-3,
        steps: int = 1,
        clamp: bool = True,
        base_head: str = "saved",
        head_rows: str = "all",
        recalibrate_bn: bool = False,
    ) -> None:
        self._base = base_of(pool, self.name, base_head)
        self.granularity = one_of("granularity", granularity, ("task", "layer"))
        self.lambda_, self.base_head = lambda_, base_head
        self._first = resolve_lambda(lambda_, len(pool), single=True)[0]
        self.learning_rate = number("learning_rate", learning_rate, low=0)
        self.steps = whole_number("steps", steps, low=1)
        self.clamp = yes_or_no("clamp", clamp)
        if clamp and not 0 <= self._first <= 1:
            raise InputError(f"With clamp, 'lambda' starts within [0, 1], else it would never move; got {lambda_!r}.")
        super().__init__(pool, head_rows=head_rows, recalibrate_bn=recalibrate_bn)
        self.reset()

    @property
    def _learns(self) -> bool:
        return True

    def _observe(self, images: Tensor) -> None:
        for _ in range(self.steps):
            gradient = self._gradient(images)
            with torch.inference_mode(False), torch.enable_grad():
                self._adam.zero_grad()
                self._effective().backward(gradient)
                self._adam.step()
            self._stale = True

    def _gradient(self, images: Tensor) -> Tensor:
        """dL/dlambda_kl = <dL/dtheta_l, theta_kl - theta_0l>: one backward pass, one model's gradient in memory."""
        gradients = entropy_gradients(self.pool, self.merged_weights(), images)
        products = torch.zeros(len(self.pool), len(gradients), device=self.pool.device)  # read back once, at the end
        for column, (entry, gradient) in enumerate(zip(self.pool.layout.parameters, gradients, strict=True)):
            start = self._base[entry.start : entry.stop].float()
            flat = gradient.flatten().float()
            for k, row in enumerate(self._rows.span(entry.start, entry.stop)):
                products[k, column] = torch.dot(row.float() - start, flat)
        products = products.cpu()
        return products.sum(dim=1) if self.granularity == "task" else products

    def _effective(self) -> Tensor:
        return self._lambdas.clamp(0, 1) if self.clamp else self._lambdas * 1

    def _merge(self, out: Tensor) -> None:
        lambdas = self._effective().detach()
        if self.granularity == "task":
            add_task_vectors(self._base, self._rows, lambdas.tolist(), out)
            return
        for column, entry in enumerate(self.pool.layout.parameters):
            start, stop = entry.start, entry.end
            add_task_vectors(
                self._base[start:stop],
                Rows(self._rows.span(start, stop), self._rows.head[:, :0]),
                lambdas[:, column].tolist(),
                out[start:stop],
            )

    def _told(self) -> dict[str, Any]:
        return {"lambdas": self._effective().detach().clone()}

    def _state(self) -> dict[str, Any]:
        moments = self._adam.state.get(self._lambdas, {})
        return {
            "lambdas": self._lambdas.detach().clone(),
            "adam": {name: value.clone() for name, value in moments.items()},
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        shape = (len(self.pool),) if self.granularity == "task" else (len(self.pool), len(self.pool.layout.parameters))
        with torch.inference_mode(False):
            lambdas = state.get("lambdas", torch.full(shape, self._first))
            if lambdas.shape != shape:
                raise ValueError(f"lambdas have shape {tuple(lambdas.shape)}, not {shape}")
            self._lambdas = nn.Parameter(lambdas.clone())
            self._adam = torch.optim.Adam([self._lambdas], lr=self.learning_rate)
            moments = {name: value.clone() for name, value in state.get("adam", {}).items()}
            if moments:
                self._adam.state[self._lambdas] = moments


def entropy_gradients(pool: ExpertPool, weights: Tensor, images: Tensor) -> list[Tensor]:
    """d(mean entropy of the answers)/d theta at `weights` [P], for every parameter tensor in the layout's order."""
    module = pool.module_with(weights)
    with torch.inference_mode(False), torch.enable_grad():
        names = [entry.name for entry in pool.layout.parameters]
        parameters = {name: module.get_parameter(name).detach().requires_grad_() for name in names}
        batch = images.clone() if images.is_inference() else images
        logits = logits_of(pool.layout.call(module, parameters, batch))
        entropy = scoring.entropy(logits[None].float(), torch.ones(1, device=logits.device)).sum()
        if not entropy.requires_grad:
            raise NetworkError(
                "'adamerging' needs gradients, but this network's answers carry none (it runs under no_grad, or on "
                "integers). Choose a method that needs forward passes only."
            )
        return list(torch.autograd.grad(entropy, list(parameters.values()), materialize_grads=True))
