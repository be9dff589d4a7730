"""Experts taken into a pool, replaced and brought back. The pool's folder changes whole or not at all."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mergestream.pool.exchange.expert_checks import base_problems, check_expert
from mergestream.pool.exchange.pool_folder import (
    PoolFolder,
    changed_pool,
    copy_expert,
    locked_pool,
    read_any_card,
    remove_expert,
)
from mergestream.pool.exchange.versions import current_version, previous_version, save_version
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.pool_files import write_order
from mergestream.runtime.errors import PoolError, unknown_name


@dataclass(frozen=True)
class AcceptedExpert:
    """An expert that is in the pool now: its version, and what its reader should know."""

    expert: str
    version: int
    weights_sha256: str
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "warnings": list(self.warnings)}


def add_expert(pool: Path, expert: Path, *, name: str | None = None, allow_other_base: bool = False) -> AcceptedExpert:
    """Check a site's expert folder and take it in as the pool's last expert."""
    with locked_pool(pool) as present:
        card = _card(expert, name)
        if card.name in present.cards:
            raise PoolError(
                f"The pool has an expert '{card.name}' already. Update it with 'mergestream pool replace', or take the "
                f"new one in under another name with --name."
            )
        return _take_in(present, expert, card, allow_other_base)


def replace_expert(
    pool: Path, expert: Path, *, name: str | None = None, allow_other_base: bool = False
) -> AcceptedExpert:
    """Check a site's newer expert and put it in the old one's place; the old one is kept as a version."""
    with locked_pool(pool) as present:
        card = _card(expert, name)
        _require_known(present, card.name)
        if card == present.cards[card.name]:
            raise PoolError(f"The pool's expert '{card.name}' is this very one already; nothing was replaced.")
        return _take_in(present, expert, card, allow_other_base)


def restore_expert(pool: Path, expert: str, version: int) -> AcceptedExpert:
    """Bring a kept version back; the expert in use is kept as a version too."""
    with locked_pool(pool) as present:
        _require_known(present, expert)
        source = previous_version(present.root, expert, version)
        return _take_in(present, source, read_any_card(source), allow_other_base=False)


def _card(folder: Path, name: str | None) -> ExpertCard:
    card = read_any_card(folder)
    return card if name is None else replace(card, name=name)


def _require_known(pool: PoolFolder, name: str) -> None:
    if name not in pool.cards:
        error = unknown_name("expert in this pool", name, pool.cards)
        raise PoolError(f"{error} A new one comes in with 'mergestream pool add'.")


def _take_in(pool: PoolFolder, source: Path, card: ExpertCard, allow_other_base: bool) -> AcceptedExpert:
    if allow_other_base and base_problems(card, pool.base):
        # A pool refuses experts of another base when it is loaded; the true start stays on record.
        card = replace(card, base_sha256=None, recipe={**card.recipe, "other_base_sha256": card.base_sha256})
    found = check_expert(pool, source, card)
    if found.problems:
        raise PoolError(f"'{card.name}' is not taken in. {' '.join(found.problems)}")
    if card.name in pool.cards:
        save_version(pool.root, pool.cards[card.name])
    names = list(dict.fromkeys([*pool.cards, card.name]))
    with changed_pool(pool.root) as scratch:
        remove_expert(scratch / card.name)
        copy_expert(scratch / card.name, source, card)
        write_order(scratch, names)
    return AcceptedExpert(card.name, current_version(pool.root, card.name), card.weights_sha256, found.warnings)
