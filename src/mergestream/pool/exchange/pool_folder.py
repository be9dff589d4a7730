"""A pool's folder: its cards in order, changes that happen whole or not at all, and previous versions beside it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mergestream.pool.checkpoint import STATISTICS, WEIGHTS
from mergestream.pool.expert_card import BASE, CARD, SCHEMA_VERSION, ExpertCard, is_expert_folder, read_card
from mergestream.pool.parts import expert_folders, require_some
from mergestream.runtime.errors import CheckpointError, OutputError, PoolError
from mergestream.runtime.files import (
    atomic_folder,
    error_text,
    process_lock,
    read_json,
    sha256_of_file,
    write_atomically,
    write_json,
)


@dataclass(frozen=True)
class PoolFolder:
    """The cards of a pool on disk by name, in order, and its base's. It may hold no expert yet."""

    root: Path
    cards: dict[str, ExpertCard]
    base: ExpertCard | None

    def folder(self, name: str) -> Path:
        return self.root / name

    def others(self, name: str) -> list[ExpertCard]:
        return [card for card in self.cards.values() if card.name != name]


def pool_root(pool: Path) -> Path:
    """The pool's real path, links followed."""
    root = pool.resolve()
    if not root.is_dir():
        raise PoolError(
            f"There is no pool at {pool}. For a new one, make that folder and put the shared start in base/."
        )
    return root


def read_pool(pool: Path) -> PoolFolder:
    """Read the cards of a pool on disk."""
    root = pool_root(pool)
    if is_expert_folder(root):
        raise PoolError(f"{pool} is one expert's folder, not a pool. Give the folder that holds it.")
    cards = {folder.name: read_card(folder) for folder in expert_folders(root)}
    base = read_card(root / BASE) if (root / BASE).is_dir() else None
    return PoolFolder(root, cards, base)


@contextmanager
def locked_pool(pool: Path) -> Iterator[PoolFolder]:
    """Yield the present pool, locked against changes by other processes."""
    root = pool_root(pool)
    with process_lock(root):
        yield read_pool(root)


@contextmanager
def changed_pool(root: Path) -> Iterator[Path]:
    """Yield a copy of the pool folder to change; it replaces the pool in one step when the block ends without an error.

    Files are hard links, so nothing large is copied; other files in the pool stay in it.
    """
    with atomic_folder(root, lambda _: True) as scratch:
        try:
            shutil.copytree(root, scratch, copy_function=_link, symlinks=True, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise OutputError(f"Cannot copy the pool {root} to change it: {error_text(error)}.") from error
        yield scratch


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links, or another owner's file
        shutil.copy2(source, target, follow_symlinks=False)


def read_any_card(folder: Path) -> ExpertCard:
    """Read the card in a folder of any name: one that a site sent, or a previous version."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder {folder}. An expert is a folder with {WEIGHTS} and {CARD}.")
    return ExpertCard.from_json(read_json(folder / CARD, SCHEMA_VERSION), folder / CARD)


def copy_expert(folder: Path, source: Path, card: ExpertCard) -> None:
    """Copy an expert's files into `folder` and check their hash again."""
    for name in (WEIGHTS, STATISTICS):
        if (source / name).is_file():
            write_atomically(folder / name, partial(shutil.copyfile, source / name))
    if sha256_of_file(folder / WEIGHTS) != card.weights_sha256:
        raise CheckpointError(f"{source / WEIGHTS} changed while it was read. Try again.")
    write_json(folder / CARD, card.to_json())


def require_new_folder(out: Path) -> None:
    """Refuse an output folder that exists, or whose name cannot be an expert's."""
    require_some({out.name: out})
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise OutputError(f"{out} exists already and is not overwritten. Choose a new folder.")


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
