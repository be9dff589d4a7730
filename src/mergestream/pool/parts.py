"""Parts: everything a pool is built from, taken from live modules, state dicts or a folder of expert folders."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mergestream.networks.architecture import Network, count_classes, recover_architecture
from mergestream.networks.flat_layout import Integers, Layout
from mergestream.pool import checkpoint
from mergestream.pool.checkpoint import Statistics, open_weights, read_statistics
from mergestream.pool.expert_card import BASE, CARD, ExpertCard, require_alike
from mergestream.pool.pool_folder import ORDER, PoolFolder, read_pool, read_recommendation, write_pool_file
from mergestream.runtime.errors import MissingPathError, PoolError
from mergestream.runtime.files import atomic_folder

if TYPE_CHECKING:
    from mergestream.pool.expert_pool import ExpertPool
    from mergestream.pool.trust.trusted_signers import TrustedSigners


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
    read_base: Callable[[], Tensor] | None
    read_statistics: tuple[Callable[[], Statistics | None], ...]
    read_candidates: "Callable[[], ExpertPool | None]" = absent
    recommendation: dict[str, Any] | None = None  # as pool.json has it
    signers: Mapping[str, str] | None = None  # by expert; None where signatures were not checked


def parts_of_states(
    states: Mapping[str, Mapping[str, Tensor]],
    network: Network,
    base: Mapping[str, Tensor] | None,
    classes: Iterable[str] | None,
) -> Parts:
    """Copy state dicts into a bank; the network's own weights are freed."""
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
    base_row = None if base is None else read_base_row(layout, base, bank.dtype)
    read = None if base_row is None else lambda: base_row
    return Parts(tuple(cards), bank, tuple(integers), network, layout, read, (absent,) * len(cards))


def require_classes(classes: Sequence[str], network: Network) -> None:
    """Refuse a class list whose length is not the width of the network's head."""
    count = count_classes(network.module, network.head)
    if count not in (None, len(classes)):
        raise PoolError(f"{len(classes)} classes were given, but the head answers {count}.")


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
    if isinstance(state, checkpoint.WeightsFile):
        return state.dtypes()
    return {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}


def read_base_row(layout: Layout, state: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Copy the base's state dict into a new row [P]."""
    row = torch.empty(layout.size, dtype=dtype)
    layout.write_row(state, row, BASE)
    return row


def read_parts(
    root: Path,
    network: nn.Module | None,
    device: Device,
    dtype: torch.dtype | None,
    trusted: "TrustedSigners | None" = None,
) -> Parts:
    """Read a folder of expert folders; weights stream straight into the bank."""
    folder = read_pool(root, trusted)
    if not folder.cards:
        raise MissingPathError(f"No expert in {root}: a pool is a folder of expert folders, each with {CARD}.")
    cards = list(folder.cards.values())
    require_alike(cards, folder.base)
    states = {card.name: open_weights(folder.root / card.name, card, folder.hashes(card.name)) for card in cards}
    blueprint = cards[0].network(network, most=states[cards[0].name].numbers)
    layout = Layout.of(blueprint.module, blueprint.head)
    require_classes(cards[0].classes, blueprint)
    layout.strip(blueprint.module)
    bank, integers = fill_bank(layout, states, device, dtype)
    return Parts(
        tuple(cards),
        bank,
        tuple(integers),
        blueprint,
        layout,
        # Read once for all pools derived from this one. Only the bank's dtype: the function must not keep it alive.
        cache(partial(_read_base, layout, folder, folder.base, bank.dtype)) if folder.base else None,
        tuple(partial(read_statistics, folder.root / card.name, card, folder.hashes(card.name)) for card in cards),
        recommendation=read_recommendation(folder.root),
        signers={name: files.signer for name, files in folder.signed.items()} if trusted else None,
    )


def write_pool(folder: Path, pool: "ExpertPool") -> None:
    """Write the experts, their order and the base; the folder is replaced whole or not at all."""
    with atomic_folder(folder, holds_only_a_pool) as scratch:
        base_sha256 = None
        if pool.base is not None:
            card = replace(pool.cards[0], name=BASE, domain=None, class_counts={}, metrics={}, recipe={})
            state = {**pool.layout.views(pool.base), **pool.merged_integers}
            base_sha256 = checkpoint.write_expert(scratch / BASE, state, card).weights_sha256
        for k, card in enumerate(pool.cards):
            state = {**pool.layout.views(pool.bank[k]), **pool.integers[k]}
            written = checkpoint.write_expert(scratch / card.name, state, replace(card, base_sha256=base_sha256))
            statistics = pool.statistics[k]
            if statistics is not None:
                checkpoint.write_statistics(scratch / card.name, statistics, written)
        write_pool_file(scratch, pool.names, pool.recommendation)


def holds_only_a_pool(root: Path) -> bool:
    """Whether a folder may be replaced by another pool: it contains only experts and their order."""
    return all(path.name == ORDER or checkpoint.holds_only_an_expert(path) for path in root.iterdir())


def _read_base(layout: Layout, folder: PoolFolder, card: ExpertCard, dtype: torch.dtype) -> Tensor:
    return read_base_row(layout, open_weights(folder.root / BASE, card, folder.hashes(BASE)), dtype)
