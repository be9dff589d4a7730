"""Experts added to a pool, replaced and restored. The pool's folder changes whole or not at all."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from mergestream.pool import pool_folder
from mergestream.pool.checkpoint import WEIGHTS
from mergestream.pool.exchange.expert_checks import check_expert
from mergestream.pool.expert_card import CARD, ExpertCard, base_problems
from mergestream.pool.pool_folder import PoolFolder, locked_pool
from mergestream.runtime.errors import PoolError, unknown_name


@dataclass(frozen=True)
class AcceptedExpert:
    """An expert that is in the pool now: its version, and warnings about it."""

    expert: str
    version: int
    weights_sha256: str
    warnings: tuple[str, ...]


def add_expert(pool: Path, expert: Path, *, name: str | None = None, allow_other_base: bool = False) -> AcceptedExpert:
    """Check a site's expert folder and add it as the pool's last expert."""
    with locked_pool(pool) as present:
        card = _card(expert, name)
        if card.name in present.cards:
            raise PoolError(
                f"The pool has an expert '{card.name}' already. Update it with 'mergestream pool replace', or add the "
                f"new one under another name with --name."
            )
        return _accept(present, expert, card, allow_other_base)


def replace_expert(
    pool: Path, expert: Path, *, name: str | None = None, allow_other_base: bool = False
) -> AcceptedExpert:
    """Check a site's newer expert and replace the old one, which is saved as a version."""
    with locked_pool(pool) as present:
        card = _card(expert, name)
        _require_present(present, card.name)
        if card == present.cards[card.name]:
            raise PoolError(f"The pool's expert '{card.name}' is identical; nothing was replaced.")
        return _accept(present, expert, card, allow_other_base)


def restore_expert(pool: Path, expert: str, version: int) -> AcceptedExpert:
    """Restore a previous version; the expert in use is saved as a version too."""
    with locked_pool(pool) as present:
        _require_present(present, expert)
        versions = pool_folder.previous_versions(present.root, expert)
        if version not in versions:
            numbers = ", ".join(map(str, versions)) or "none"
            raise PoolError(f"No version {version} of '{expert}' is kept beside this pool. Kept: {numbers}.")
        return _accept(present, versions[version], ExpertCard.read(versions[version]), allow_other_base=False)


def _card(folder: Path, name: str | None) -> ExpertCard:
    if not folder.is_dir():
        raise PoolError(f"There is no folder {folder}. An expert is a folder with {WEIGHTS} and {CARD}.")
    card = ExpertCard.read(folder)
    return card if name is None else replace(card, name=name)


def _require_present(pool: PoolFolder, name: str) -> None:
    if name not in pool.cards:
        error = unknown_name("expert in this pool", name, pool.cards)
        raise PoolError(f"{error} Add a new one with 'mergestream pool add'.")


def _accept(pool: PoolFolder, source: Path, card: ExpertCard, allow_other_base: bool) -> AcceptedExpert:
    if allow_other_base and base_problems(card, pool.base):
        # A pool refuses experts of another base when it is loaded; the true start stays on record.
        card = replace(card, base_sha256=None, recipe={**card.recipe, "other_base_sha256": card.base_sha256})
    warnings = check_expert(pool, source, card)
    if card.name in pool.cards:
        pool_folder.save_version(pool.root, pool.cards[card.name])
    names = list(dict.fromkeys([*pool.cards, card.name]))
    with pool_folder.changed_pool(pool.root) as scratch:
        if (scratch / card.name).is_symlink():
            (scratch / card.name).unlink()
        elif (scratch / card.name).exists():
            shutil.rmtree(scratch / card.name)
        pool_folder.copy_expert(scratch / card.name, source, card)
        pool_folder.write_order(scratch, names)
    version = max(pool_folder.previous_versions(pool.root, card.name), default=0) + 1
    return AcceptedExpert(card.name, version, card.weights_sha256, warnings)
