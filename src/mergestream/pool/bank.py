"""The contiguous [K,P] bank: filled from experts one tensor at a time, and only with experts that belong together."""

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from mergestream.networks.flat_layout import Integers, Layout
from mergestream.pool.checkpoint import (
    BASE,
    CARD,
    PICKLES,
    SCHEMA_VERSION,
    WEIGHTS,
    ExpertCard,
    WeightsFile,
    holds_only_an_expert,
    is_expert_folder,
    require_name,
)
from mergestream.runtime.errors import PoolError
from mergestream.runtime.files import read_json, write_json

ORDER = "pool.json"


def expert_folders(root: Path) -> list[Path]:
    """The experts in a pool folder, in the order that `pool.json` records, else by name.

    A folder with weights but no card, or a recorded expert without a folder, is an error, not a silent absence.
    """
    folders = [p for p in sorted(root.glob("*")) if p.is_dir() and not p.name.startswith(".") and p.name != BASE]
    for folder in folders:
        weights = [p.name for p in folder.iterdir() if p.name == WEIGHTS or p.suffix in PICKLES]
        if weights and not is_expert_folder(folder):
            raise PoolError(f"{folder} holds {weights[0]} but no {CARD}. Ask the site for the whole expert folder.")
    found = [folder for folder in folders if is_expert_folder(folder)]
    order = read_json(root / ORDER, SCHEMA_VERSION).get("order", []) if (root / ORDER).exists() else []
    missing = [name for name in order if name not in {folder.name for folder in found}]
    if missing:
        raise PoolError(f"{root / ORDER} lists the expert '{missing[0]}', but its folder is not there.")
    return sorted(found, key=lambda folder: order.index(folder.name) if folder.name in order else len(order))


def holds_only_a_pool(root: Path) -> bool:
    """Whether a folder may be replaced by another pool: nothing but experts and their order is in it."""
    return all(path.name == ORDER or holds_only_an_expert(path) for path in root.iterdir())


def write_order(root: Path, names: Sequence[str]) -> None:
    """Record the order of a pool's experts: coefficients and states are by position."""
    write_json(root / ORDER, {"schema_version": SCHEMA_VERSION, "order": list(names)})


def require_some(experts: Mapping[str, object]) -> None:
    if not experts:
        raise PoolError("A pool needs at least one expert; none was given.")
    if BASE in experts:
        raise PoolError(f"An expert cannot be called '{BASE}': that folder holds the shared start.")
    for name in experts:
        require_name(name)


def require_alike(cards: Sequence[ExpertCard], base: ExpertCard | None) -> None:
    """Refuse experts that differ in anything a merge depends on, naming both and the difference."""
    first = cards[0]
    for card in [*cards[1:], *([base] if base else [])]:
        for what in ("architecture", "head", "classes", "preprocessing"):
            mine, theirs = getattr(first, what), getattr(card, what)
            if mine == theirs:
                continue
            same_set = what == "classes" and sorted(mine) == sorted(theirs)
            hint = " The classes are the same in another order: reorder that head's rows." if same_set else ""
            raise PoolError(f"'{first.name}' and '{card.name}' differ in {what}: {mine} against {theirs}.{hint}")
    for card in cards:
        if base is not None and card.base_sha256 not in (None, base.weights_sha256):
            raise PoolError(f"Expert '{card.name}' was not trained from this pool's base (its base_sha256 differs).")


def fill_bank(
    layout: Layout, states: Mapping[str, Mapping[str, Tensor]], device: torch.device | str, dtype: torch.dtype | None
) -> tuple[Tensor, list[Integers]]:
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
    row = torch.empty(layout.size, dtype=dtype)
    layout.write_row(state, row, owner)
    return row
