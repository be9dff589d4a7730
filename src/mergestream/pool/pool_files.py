"""A pool on disk: a folder of expert folders, their order in `pool.json`, the base, and candidates beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mergestream.networks.flat_layout import Layout
from mergestream.pool.card_comparison import require_alike
from mergestream.pool.checkpoint import PICKLES, WEIGHTS, holds_only_an_expert, open_weights, write_expert
from mergestream.pool.expert_card import BASE, CARD, SCHEMA_VERSION, ExpertCard, is_expert_folder, read_card
from mergestream.pool.parts import Device, Parts, fill_bank, read_row, require_classes
from mergestream.pool.statistics import read_statistics, write_statistics
from mergestream.runtime.errors import PoolError
from mergestream.runtime.files import atomic_folder, read_json, write_json

if TYPE_CHECKING:
    from mergestream.pool.expert_pool import ExpertPool

ORDER = "pool.json"


def read_parts(root: Path, network: nn.Module | None, device: Device, dtype: torch.dtype | None) -> Parts:
    """Read a folder of expert folders; weights stream straight into the bank."""
    folders = expert_folders(root) if root.is_dir() else []
    if not folders:
        raise PoolError(f"No expert in {root}: a pool is a folder of expert folders, each with {CARD}.")
    cards = [read_card(path) for path in folders]
    base = root / BASE
    base_card = read_card(base) if base.is_dir() else None
    require_alike(cards, base_card)
    blueprint = cards[0].network(network)
    layout = Layout.of(blueprint.module, blueprint.head)
    require_classes(cards[0].classes, blueprint)
    layout.strip(blueprint.module)
    states = {card.name: open_weights(path, card) for path, card in zip(folders, cards, strict=True)}
    bank, integers = fill_bank(layout, states, device, dtype)
    return Parts(
        tuple(cards),
        bank,
        tuple(integers),
        blueprint,
        layout,
        # Only its dtype: the function must not keep the bank alive.
        partial(_read_base, layout, base, base_card, bank.dtype) if base_card else None,
        tuple(partial(read_statistics, path, card) for path, card in zip(folders, cards, strict=True)),
    )


def write_pool(folder: Path, pool: ExpertPool) -> None:
    """Write the experts, their order and the base; the folder is replaced whole or not at all."""
    with atomic_folder(folder, holds_only_a_pool) as scratch:
        base_sha256 = None
        if pool.base is not None:
            card = replace(pool.cards[0], name=BASE, domain=None, class_counts={}, metrics={}, recipe={})
            state = {**pool.layout.views(pool.base), **pool.merged_integers}
            base_sha256 = write_expert(scratch / BASE, state, card).weights_sha256
        for k, card in enumerate(pool.cards):
            state = {**pool.layout.views(pool.bank[k]), **pool.integers[k]}
            written = write_expert(scratch / card.name, state, replace(card, base_sha256=base_sha256))
            statistics = pool.statistics[k]
            if statistics is not None:
                write_statistics(scratch / card.name, statistics, written)
        write_order(scratch, pool.names)


def candidates_folder(root: Path) -> Path:
    """The folder of a pool's candidate runs, beside the pool."""
    whole = root.resolve()
    return whole.with_name(f"{whole.name}.candidates")


def expert_folders(root: Path) -> list[Path]:
    """Expert folders of a pool, in the order of `pool.json`, otherwise by name.

    Refuses a folder with weights but no card, and a recorded expert without a folder.
    """
    folders = [p for p in sorted(root.glob("*")) if p.is_dir() and not p.name.startswith(".") and p.name != BASE]
    for folder in folders:
        weights = [p.name for p in folder.iterdir() if p.name == WEIGHTS or p.suffix in PICKLES]
        if weights and not is_expert_folder(folder):
            raise PoolError(f"{folder} holds {weights[0]} but no {CARD}. Ask the site for the whole expert folder.")
    experts = [folder for folder in folders if is_expert_folder(folder)]
    order = read_json(root / ORDER, SCHEMA_VERSION).get("order", []) if (root / ORDER).exists() else []
    missing = [name for name in order if name not in {folder.name for folder in experts}]
    if missing:
        raise PoolError(f"{root / ORDER} lists the expert '{missing[0]}', but its folder is not there.")
    return sorted(experts, key=lambda folder: order.index(folder.name) if folder.name in order else len(order))


def holds_only_a_pool(root: Path) -> bool:
    """Whether a folder may be replaced by another pool: it contains only experts and their order."""
    return all(path.name == ORDER or holds_only_an_expert(path) for path in root.iterdir())


def write_order(root: Path, names: Sequence[str]) -> None:
    """Record the order of a pool's experts: coefficients and states go by position."""
    write_json(root / ORDER, {"schema_version": SCHEMA_VERSION, "order": list(names)})


def _read_base(layout: Layout, folder: Path, card: ExpertCard, dtype: torch.dtype) -> Tensor:
    return read_row(layout, open_weights(folder, card), BASE, dtype)
