"""The mean of the experts' weights (Eq. 2): the same fixed coefficients for every batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.methods.base import option
from mergestream.methods.merged_model import MergedModel, MergedState
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, PoolError, require_known
from mergestream.runtime.option_checks import names, one_of

VARIANTS = ("uniform", "restricted", "greedy", "all_runs")


@dataclass(kw_only=True, eq=False, repr=False)
class Mean(MergedModel[MergedState]):
    """variant='uniform' averages the experts, as the paper does. DiWA's others average the runs that the experts were
    chosen from: 'all_runs', or those that `soups.select_runs` chose: 'restricted' and 'greedy'."""

    name: ClassVar[str] = "mean"
    coefficients: str | Sequence[float] = "uniform"  # or 'samples' (by training-set size, as FedAvg), or numbers
    variant: str = option("uniform", one_of, VARIANTS)
    runs: Sequence[str] = option((), names)  # names of the chosen runs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant != "uniform":
            self.needs = ("candidates",)
        self._coefficients = self._resolve(self.coefficients)
        if not isinstance(self.coefficients, str):
            self.coefficients = self._coefficients.tolist()

    @cached_property
    def _members(self) -> ExpertPool:
        if self.variant == "uniform":
            return self.pool
        if self.pool.candidates is None:
            raise PoolError(
                f"variant='{self.variant}' averages the runs that the experts were chosen from, and this pool kept "
                f"none. Put them into a pool folder of the same name with '.candidates' behind it, or use "
                f"pool.with_candidates(runs)."
            )
        members = self.pool.candidates.to(self.pool.device, self.pool.bank.dtype)
        members.passes = self.pool.passes  # counted together
        return members

    def merge_parameters(self, state: MergedState, out: Tensor) -> None:
        self._members.merge(self._coefficients, out=out, rows=self._rows_of(self._coefficients))

    def _buffer_coefficients(self) -> Tensor:
        return self._coefficients

    def report(self, state: MergedState) -> dict[str, Any]:
        if self.variant != "uniform":
            return {}
        return {"encoder_coefficients": self._coefficients.clone(), "head_coefficients": self._coefficients.clone()}

    def _resolve(self, coefficients: str | Sequence[float]) -> Tensor:
        if self.variant in ("restricted", "greedy"):
            return self._of_chosen(coefficients)
        if self.runs:
            raise InputError(f"The option 'runs' is for variant='restricted' or 'greedy', not '{self.variant}'.")
        members = self._members
        if not isinstance(coefficients, str):
            return simplex.on_simplex(coefficients, len(members), members.device)
        if one_of("coefficients", coefficients, ("uniform", "samples")) == "uniform":
            return simplex.uniform(len(members), members.device)
        counts = torch.tensor([sum(card.class_counts.values()) for card in members.cards], dtype=torch.float32)
        if not bool((counts > 0).all()):
            raise PoolError("coefficients='samples' needs class_counts in every expert's card; give numbers instead.")
        return (counts / counts.sum()).to(members.device)

    def _of_chosen(self, coefficients: str | Sequence[float]) -> Tensor:
        if not isinstance(coefficients, str) or coefficients != "uniform":
            raise InputError(f"variant='{self.variant}' averages its runs equally; leave 'coefficients' out.")
        if not self.runs:
            raise InputError(
                f"variant='{self.variant}' averages runs chosen on labelled images of the sources, which only a "
                f"simulation has in one place: runs=mergestream.methods.soups.select_runs(pool.candidates, validation, "
                f"'{self.variant}')."
            )
        members = self._members
        for name in self.runs:
            require_known("run among this pool's candidates", name, members.names)
        shares = [1 / len(self.runs) if name in self.runs else 0.0 for name in members.names]
        return torch.tensor(shares, device=members.device)

    def source_hashes(self) -> dict[str, str]:
        return {} if self.variant == "uniform" else {"candidates": self._members.fingerprint()}
