"""Experts that were replaced, kept beside their pool: `<pool>.versions/<expert>/<number>/`. None is ever removed."""

from pathlib import Path

from mergestream.pool.checkpoint import STATISTICS, WEIGHTS
from mergestream.pool.exchange.pool_folder import copy_expert, read_any_card
from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.errors import PoolError
from mergestream.runtime.files import atomic_folder, sha256_of_file


def versions_folder(root: Path) -> Path:
    whole = root.resolve()
    return whole.with_name(f"{whole.name}.versions")


def kept_versions(root: Path, expert: str) -> dict[int, Path]:
    """Folders of the versions that are no longer in use, oldest first."""
    folder = versions_folder(root) / expert
    numbered = [path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()]
    return {int(path.name): path for path in sorted(numbered, key=lambda path: int(path.name))}


def current_version(root: Path, expert: str) -> int:
    """The number of the version in use: one more than the newest that was kept."""
    return max(kept_versions(root, expert), default=0) + 1


def previous_version(root: Path, expert: str, number: int) -> Path:
    kept = kept_versions(root, expert)
    if number not in kept:
        known = ", ".join(map(str, kept)) or "none"
        raise PoolError(f"No version {number} of '{expert}' is kept beside this pool. Kept: {known}.")
    return kept[number]


def save_version(root: Path, card: ExpertCard) -> int:
    """Keep the expert in use under its number, before another takes its place."""
    kept = kept_versions(root, card.name)
    newest = max(kept, default=0)
    # A kill between keeping and replacing leaves it kept already.
    if newest and _same(kept[newest], root / card.name):
        return newest
    with atomic_folder(versions_folder(root) / card.name / str(newest + 1), lambda _: False) as scratch:
        copy_expert(scratch, root / card.name, card)
    return newest + 1


def _same(one: Path, other: Path) -> bool:
    if read_any_card(one) != read_any_card(other):
        return False
    return all(_digest(one / name) == _digest(other / name) for name in (WEIGHTS, STATISTICS))


def _digest(path: Path) -> str | None:
    return sha256_of_file(path) if path.is_file() else None
