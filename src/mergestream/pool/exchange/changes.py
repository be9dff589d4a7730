"""Experts added to a pool, replaced and restored. The pool's folder changes whole or not at all."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from mergestream.pool import pool_folder
from mergestream.pool.checkpoint import SIGNATURE, WEIGHTS
from mergestream.pool.exchange.expert_checks import check_expert
from mergestream.pool.expert_card import CARD, ExpertCard, base_problems
from mergestream.pool.pool_folder import PoolFolder, locked_pool
from mergestream.pool.trust.revocations import read_revocations
from mergestream.pool.trust.trusted_signers import TrustedSigners, trusted_signers
from mergestream.runtime.errors import (
    InputError,
    MissingPathError,
    PoolError,
    SignatureError,
    UnknownNameError,
    unknown_name,
)
from mergestream.runtime.files import sha256_if_file


@dataclass(frozen=True)
class AcceptedExpert:
    """An expert that is in the pool now: its version, and warnings about it."""

    expert: str
    version: int
    weights_sha256: str
    warnings: tuple[str, ...]
    signed_by: str | None = None  # None where signatures were not checked


def add_expert(
    pool: Path,
    expert: Path,
    *,
    name: str | None = None,
    allow_other_base: bool = False,
    require_signed_by: Path | None = None,
) -> AcceptedExpert:
    """Check a site's expert folder and add it as the pool's last expert."""
    trusted = trusted_signers(require_signed_by)
    with locked_pool(pool) as present:
        card = _card(expert, name)
        if card.name in present.cards:
            raise PoolError(
                f"The pool has an expert '{card.name}' already. Update it with 'mergestream pool replace', or add the "
                f"new one under another name with --name."
            )
        return _accept(present, expert, card, allow_other_base, trusted)


def replace_expert(
    pool: Path,
    expert: Path,
    *,
    name: str | None = None,
    allow_other_base: bool = False,
    require_signed_by: Path | None = None,
) -> AcceptedExpert:
    """Check a site's newer expert and replace the old one, which is saved as a version."""
    trusted = trusted_signers(require_signed_by)
    with locked_pool(pool) as present:
        card = _card(expert, name)
        _require_present(present, card.name)
        same_signature = sha256_if_file(expert / SIGNATURE) == sha256_if_file(present.root / card.name / SIGNATURE)
        if card == present.cards[card.name] and same_signature:
            raise PoolError(f"The pool's expert '{card.name}' is identical; nothing was replaced.")
        return _accept(present, expert, card, allow_other_base, trusted)


def restore_expert(pool: Path, expert: str, version: int, *, require_signed_by: Path | None = None) -> AcceptedExpert:
    """Restore a previous version; the expert in use is saved as a version too."""
    trusted = trusted_signers(require_signed_by)
    with locked_pool(pool) as present:
        _require_present(present, expert)
        versions = pool_folder.previous_versions(present.root, expert)
        if version not in versions:
            numbers = ", ".join(map(str, versions)) or "none"
            raise InputError(f"No version {version} of '{expert}' is kept beside this pool. Kept: {numbers}.")
        return _accept(present, versions[version], ExpertCard.read(versions[version]), False, trusted)


def _card(folder: Path, name: str | None) -> ExpertCard:
    if not folder.is_dir():
        raise MissingPathError(f"There is no folder {folder}. An expert is a folder with {WEIGHTS} and {CARD}.")
    card = ExpertCard.read(folder)
    return card if name is None else replace(card, name=name)


def _require_present(pool: PoolFolder, name: str) -> None:
    if name not in pool.cards:
        error = unknown_name("expert in this pool", name, pool.cards)
        raise UnknownNameError(f"{error} Add a new one with 'mergestream pool add'.")


def remove_expert(pool: Path, expert: str) -> int:
    """Take an expert out of the pool; it is saved as a version, whose number is returned. The others stay in order."""
    with locked_pool(pool) as present:
        _require_present(present, expert)
        pool_folder.save_version(present.root, present.cards[expert])
        with pool_folder.changed_pool(present.root) as scratch:
            _clear(scratch / expert)
            pool_folder.write_order(scratch, [name for name in present.cards if name != expert])
        return max(pool_folder.previous_versions(present.root, expert))


def _accept(
    pool: PoolFolder, source: Path, card: ExpertCard, allow_other_base: bool, trusted: TrustedSigners | None
) -> AcceptedExpert:
    if allow_other_base and base_problems(card, pool.base):
        # A pool refuses experts of another base when it is loaded; the true start stays on record.
        card = replace(card, base_sha256=None, recipe={**card.recipe, "other_base_sha256": card.base_sha256})
    if trusted is not None:
        trusted.signed_expert(source)
        if card != ExpertCard.read(source):
            raise SignatureError(
                f"{source} is signed as it is: --name and --allow-other-base would change its card. Ask the site to "
                f"sign it under the pool's name and base."
            )
    read_revocations(pool.root, trusted).refuse([card])
    warnings = check_expert(pool, source, card)
    if card.name in pool.cards:
        pool_folder.save_version(pool.root, pool.cards[card.name])
    names = list(dict.fromkeys([*pool.cards, card.name]))
    with pool_folder.changed_pool(pool.root) as scratch:
        _clear(scratch / card.name)
        pool_folder.copy_expert(scratch / card.name, source, card)
        # Again, on the copy: the source may have changed since.
        signer = trusted.signed_expert(scratch / card.name).signer if trusted else None
        pool_folder.write_order(scratch, names)
    version = max(pool_folder.previous_versions(pool.root, card.name), default=0) + 1
    return AcceptedExpert(card.name, version, card.weights_sha256, warnings, signer)


def _clear(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
