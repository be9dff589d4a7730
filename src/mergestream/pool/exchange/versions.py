"""Previous versions of experts, beside their pool: `<pool>.versions/<expert>/<number>/`. None is ever removed."""

from pathlib import Path

from mergestream.pool.checkpoint import STATISTICS, WEIGHTS
from mergestream.pool.exchange.pool_folder import copy_expert, read_any_card
from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.errors import PoolError
from mergestream.runtime.files import atomic_folder, sha256_of_file


def versions_folder(root: Path) -> Path:
    whole = root.resolve()
    return whole.with_name(f"{whole.name}.versions")


def previous_versions(root: Path, expert: str) -> dict[int, Path]:
    """Folders of the versions that are no longer in use, oldest first."""
    folder = versions_folder(root) / expert
    numbered = [path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()]
    return {int(path.name): path for path in sorted(numbered, key=lambda path: int(path.name))}


def current_version(root: Path, expert: str) -> int:
    """Number of the version in use: one more than the newest previous one."""
    return max(previous_versions(root, expert), default=0) + 1


def previous_version(root: Path, expert: str, number: int) -> Path:
    """Folder of one previous version."""
    versions = previous_versions(root, expert)
    if number not in versions:
        numbers = ", ".join(map(str, versions)) or "none"
        raise PoolError(f"No version {number} of '{expert}' is kept beside this pool. Kept: {numbers}.")
    return versions[number]


def save_version(root: Path, card: ExpertCard) -> None:
    """Copy the expert in use to its version folder, before another replaces it."""
    versions = previous_versions(root, card.name)
    newest = max(versions, default=0)
    # A process killed between saving and replacing has saved it already.
    if newest and _same(versions[newest], root / card.name):
        return
    with atomic_folder(versions_folder(root) / card.name / str(newest + 1), lambda _: False) as scratch:
        copy_expert(scratch, root / card.name, card)


def _same(one: Path, other: Path) -> bool:
    return read_any_card(one) == read_any_card(other) and all(
        _digest(one / name) == _digest(other / name) for name in (WEIGHTS, STATISTICS)
    )


def _digest(path: Path) -> str | None:
    return sha256_of_file(path) if path.is_file() else None
