"""Parts: everything a pool is built from, and how to take it from live modules or state dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mergestream.networks.architecture import (
    Network,
    create_network,
    first_difference,
    from_module,
    recover_architecture,
)
from mergestream.networks.flat_layout import Integers, Layout
from mergestream.networks.head import class_names, count_classes, find_head
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.checkpoint import WeightsFile
from mergestream.pool.expert_card import BASE, ExpertCard, require_name
from mergestream.pool.statistics import Statistics
from mergestream.runtime.errors import PoolError

if TYPE_CHECKING:
    from mergestream.pool.expert_pool import ExpertPool

Device = torch.device | str


def absent() -> None:
    """Reader of a part that a pool does not have."""


@dataclass(frozen=True)
class Parts:
    """Cards, bank [K,P] and integer buffers per expert; the network and its layout; readers of parts loaded later."""

    cards: tuple[ExpertCard, ...]
    bank: Tensor
    integers: tuple[Integers, ...]
    network: Network
    layout: Layout
    read_base: Callable[[], Tensor] | None = None
    read_statistics: tuple[Callable[[], Statistics | None], ...] = ()
    read_candidates: Callable[[], ExpertPool | None] = absent


def parts_of_modules(
    modules: Mapping[str, nn.Module],
    base: nn.Module | None,
    classes: Iterable[str] | None,
    head: str | Iterable[str] | None,
    preprocessing: Preprocessing | None,
) -> Parts:
    require_some(modules)
    first = next(iter(modules.values()))
    network = from_module(copy.deepcopy(first).eval(), head, preprocessing)
    for name, module in modules.items():
        if type(module) is not type(first):
            raise PoolError(f"Expert '{name}' is a {type(module).__name__}, not a {type(first).__name__}.")
        own = preprocessing or from_module(module, network.head).preprocessing
        if own != network.preprocessing:
            raise PoolError(f"Expert '{name}' differs in preprocessing: {own}, not {network.preprocessing}.")
    for name, module in [*modules.items(), *([(BASE, base)] if base is not None else [])]:
        difference = first_difference(first, module)
        if difference:
            raise PoolError(f"'{name}' is built differently from '{next(iter(modules))}': {difference}.")
        if classes is None and class_names(module) != class_names(first):
            raise PoolError(f"'{name}' names its classes {class_names(module)}, not {class_names(first)}.")
    return _parts_of_states(
        {name: module.state_dict() for name, module in modules.items()},
        network,
        None if base is None else base.state_dict(),
        class_names(first) if classes is None else classes,
    )


def parts_of_states(
    states: Mapping[str, Mapping[str, Tensor]],
    network: nn.Module | str,
    base: Mapping[str, Tensor] | None,
    classes: Iterable[str] | None,
    head: str | Iterable[str] | None,
    preprocessing: Preprocessing | None,
) -> Parts:
    require_some(states)
    if not isinstance(network, str):
        blueprint = from_module(copy.deepcopy(network).eval(), head, preprocessing)
    elif classes is None:
        raise PoolError(f"To build '{network}' by name, give classes=: its head needs their number.")
    else:
        classes = tuple(classes)
        blueprint = create_network(network, num_classes=len(classes))
        head_parts = find_head(blueprint.module, head)
        blueprint = replace(blueprint, head=head_parts, preprocessing=preprocessing or blueprint.preprocessing)
    return _parts_of_states(states, blueprint, base, classes)


def _parts_of_states(
    states: Mapping[str, Mapping[str, Tensor]],
    network: Network,
    base: Mapping[str, Tensor] | None,
    classes: Iterable[str] | None,
) -> Parts:
    layout = Layout.of(network.module, network.head)
    count = count_classes(network.module, network.head)
    if classes is None and count is None:
        raise PoolError(f"The number of classes of the head {network.head} is unknown: give classes=.")
    labels = tuple(map(str, range(count or 0))) if classes is None else tuple(classes)
    require_classes(labels, network)
    if network.architecture.library == "custom":
        network = replace(network, architecture=recover_architecture(network.module))
    layout.strip(network.module)
    bank, integers = fill_bank(layout, states, "cpu", None)
    cards = [ExpertCard.for_network(name, network, labels) for name in states]
    base_row = None if base is None else read_row(layout, base, BASE, bank.dtype)
    read = None if base_row is None else lambda: base_row
    return Parts(tuple(cards), bank, tuple(integers), network, layout, read)


def require_classes(classes: Sequence[str], network: Network) -> None:
    """Refuse a class list whose length is not the width of the network's head."""
    count = count_classes(network.module, network.head)
    if count not in (None, len(classes)):
        raise PoolError(f"{len(classes)} classes were given, but the head answers {count}.")


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
