"""Task arithmetic (Ilharco et al. 2023): theta_0 + lambda * sum_k (theta_k - theta_0)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mergestream.functional.merging import Rows, weighted_sum
from mergestream.methods.merged_model import MergedState, TaskVectorModel
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import number


@dataclass(kw_only=True, eq=False, repr=False)
class TaskArithmetic(TaskVectorModel[MergedState]):
    """lambda: a number for all experts, one per expert, or '1/K', which is the mean."""

    name: ClassVar[str] = "task_arithmetic"
    lambda_: float | Sequence[float] | str = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lambdas = resolve_lambda(self.lambda_, len(self.pool))
        self._on_device = torch.tensor(self._lambdas, device=self.pool.device)  # copied once: a step may be captured

    def merge_parameters(self, state: MergedState, out: Tensor) -> None:
        add_task_vectors(self._base, self._rows, self._lambdas, out)

    def report(self, state: MergedState) -> dict[str, Any]:
        return {"lambdas": self._on_device}


def add_task_vectors(base: Tensor, rows: Rows, lambdas: Sequence[float], out: Tensor) -> Tensor:
    """theta_0 + sum_k lambda_k (theta_k - theta_0), as (1 - sum lambda) theta_0 + sum_k lambda_k theta_k.

    The same number, in one pass and without a task vector in memory; and lambda = e_k gives expert k bit for bit.
    """
    shares = [1 - math.fsum(lambdas), *lambdas]
    for start, stop in rows.segments():
        weighted_sum([base[start:stop], *rows.span(start, stop)], shares, out[start:stop])
    return out


def resolve_lambda(value: Any, experts: int, *, single: bool = False) -> list[float]:
    """Multipliers of the task vectors: a number for all, '1/K', or (unless `single`) one number per expert."""
    if isinstance(value, str) and value == "1/K":
        return [1 / experts] * experts
    listed: Any = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    several = isinstance(listed, list | tuple)
    if isinstance(listed, str) or (several and (single or len(listed) != experts)):
        allowed = "one number or '1/K'" if single else f"one number, '1/K', or {experts}: one per expert"
        raise InputError(f"The option 'lambda' is {allowed}; got {value!r}.")
    return [number("lambda", each) for each in (listed if several else [listed] * experts)]
