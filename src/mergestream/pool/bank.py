"""The contiguous bank [K,P] of all experts' weights, filled one tensor at a time."""

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from mergestream.networks.flat_layout import Integers, Layout
from mergestream.pool.checkpoint import WeightsFile
from mergestream.pool.expert_card import BASE, require_name
from mergestream.runtime.errors import PoolError

ORDER = "pool.json"


def require_some(experts: Mapping[str, object]) -> None:
    """Refuse an empty pool and names that cannot be an expert's."""
    if not experts:
        raise PoolError("A pool needs at least one expert; none was given.")
    if BASE in experts:
        raise PoolError(f"An expert cannot be called '{BASE}': that folder holds the shared start.")
    for name in experts:
        require_name(name)


def fill_bank(
    layout: Layout, states: Mapping[str, Mapping[str, Tensor]], device: torch.device | str, dtype: torch.dtype | None
) -> tuple[Tensor, list[Integers]]:
    """Copy state dicts into a new bank [K,P]; returns the integer buffers per expert too."""
    kinds = set().union(*(_float_dtypes(state) for state in states.values()))
    dtype = dtype or (reduce(torch.promote_types, sorted(kinds, key=str)) if kinds else torch.float32)
    bank = torch.empty(len(states), layout.size, dtype=dtype, device=device)
    owners = [f"Expert '{name}'" for name in states]
    integers = [
        layout.write_row(state, row, owner) for state, row, owner in zip(states.values(), bank, owners, strict=True)
    ]
    return bank, integers


def _float_dtypes(state: Mapping[str, Tensor]) -> set[torch.dtype]:
    if isinstance(state, WeightsFile):
        return state.dtypes()
    return {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}


def read_row(layout: Layout, state: Mapping[str, Tensor], owner: str, dtype: torch.dtype) -> Tensor:
    """Copy one state dict into a new row [P]."""
    row = torch.empty(layout.size, dtype=dtype)
    layout.write_row(state, row, owner)
    return row
