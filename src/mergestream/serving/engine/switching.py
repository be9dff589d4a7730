"""The experts in use: the pool less those that are switched off. What was by expert is masked and renormalised."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.methods import Method, create_method
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, PoolError

# Options that may hold one number per expert; the first are shares and stay on the simplex.
SHARES, PER_EXPERT = ("coefficients",), ("coefficients", "temperature", "lambda")
AVERAGES = ("encoder", "head")  # the moving averages in a method's state
ROWS = ("expert_moments",)  # what it holds of every expert by itself
# What is of these experts together, by the names' beginning: begun again, or one who left would go on.
OF_ALL = ("fit_", "untilted")
MethodState = Mapping[str, Any]


class Lineup:
    """A pool, a method and its options, and who is switched off. Nothing in it changes: a switch makes another one.

    An expert that is off is left out of the bank, so every number is that of `pool.without` it, bit for bit.
    """

    def __init__(self, pool: ExpertPool, method: str, options: Mapping[str, Any], off: Sequence[str] = ()) -> None:
        self.pool, self.method, self.options = pool, method, dict(options)
        self.off = tuple(name for name in pool.names if name in {pool.names[pool.index(each)] for each in off})
        if len(self.off) == len(pool):
            raise PoolError("The last expert cannot be switched off: switch another one on first.")
        self.active = pool.without(*self.off) if self.off else pool
        self.kept = [pool.index(name) for name in self.active.names]

    def switched(self, expert: str, *, on: bool) -> "Lineup":
        """The line-up with one expert on or off."""
        self.pool.index(expert)
        off = [name for name in self.off if name != expert] + ([] if on else [expert])
        return Lineup(self.pool, self.method, self.options, off)

    def create_method(self) -> Method:
        """The method on the experts in use; refused where it cannot do without one that is off."""
        chosen = self.options.get("expert")
        if self.method == "single_expert" and chosen in self.off:
            raise InputError(f"The service answers with '{chosen}' alone, which therefore cannot be switched off.")
        return create_method(self.method, self.active, **self._active_options)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a moving average belongs to, whoever is switched off."""
        return {"method": self.method, "options": self.options, "pool_sha256": self.pool.fingerprint()}

    @property
    def _active_options(self) -> dict[str, Any]:
        options = dict(self.options)
        for name in PER_EXPERT:
            value = options.get(name)
            if isinstance(value, list | tuple) and len(value) == len(self.pool):
                options[name] = self._of_kept(name, value)
        return options

    def _of_kept(self, option: str, values: Sequence[float]) -> list[float]:
        kept = [values[k] for k in self.kept]
        if option not in SHARES or not self.off:
            return kept
        total = sum(kept)
        return [value / total for value in kept] if total > 0 else [1 / len(kept)] * len(kept)

    def spread(self, values: Tensor | None, absent: float | None) -> list[float | None] | None:
        """Numbers of the experts in use as numbers of all [K], exactly; `absent` stands for those that are off."""
        if values is None:
            return None
        given = dict(zip(self.kept, values.tolist(), strict=True))
        return [given.get(k, absent) for k in range(len(self.pool))]


def carried_over(state: MethodState, before: Sequence[str], after: Sequence[str]) -> MethodState | None:
    """A method's state on other experts: averages lose who left and are renormalised; who comes back begins at 0, and
    where there is a row for each expert with the mean of the others'. What experts said together is forgotten.

    None where the state holds more about the experts than averages, so that the stream has to begin again.
    """
    if tuple(before) == tuple(after) or not state:
        return state
    averages = {name: state[name] for name in AVERAGES if _is_average(state.get(name), len(before))}
    rows = {name: state[name] for name in ROWS if name in state}
    others = {n: v for n, v in state.items() if n not in (*averages, *rows) and not n.startswith(OF_ALL)}
    if len(averages) != len(AVERAGES) or any(isinstance(value, dict | list) for value in others.values()):
        return None
    renormalised = {name: _renormalised(value, before, after) for name, value in averages.items()}
    return {**others, **renormalised, **{name: _rows_of(value, before, after) for name, value in rows.items()}}


def _is_average(value: Any, experts: int) -> bool:
    return isinstance(value, Tensor) and value.shape == (experts,)


def _rows_of(rows: Tensor, before: Sequence[str], after: Sequence[str]) -> Tensor:
    known = dict(zip(before, rows, strict=True))
    staying = [known[name] for name in after if name in known]
    usual = torch.stack(staying or list(rows)).mean(dim=0)
    return torch.stack([known.get(name, usual) for name in after])


def _renormalised(average: Tensor, before: Sequence[str], after: Sequence[str]) -> Tensor:
    shares = dict(zip(before, average.tolist(), strict=True))
    kept = torch.tensor([shares.get(name, 0.0) for name in after], dtype=average.dtype, device=average.device)
    total = kept.sum()
    return kept / total if bool(total > 0) else simplex.uniform(len(after), average.device)
