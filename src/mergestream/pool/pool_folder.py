"""A pool's folder: its cards in order, changes that happen whole or not at all, and previous versions beside it."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mergestream.pool.checkpoint import PICKLES, STATISTICS, WEIGHTS
from mergestream.pool.expert_card import (
    BASE,
    CARD,
    SCHEMA_VERSION,
    ExpertCard,
    read_card,
    read_checked,
    require_name,
    require_schema,
)
from mergestream.runtime.errors import CheckpointError, OutputError, PoolError
from mergestream.runtime.files import (
    atomic_folder,
    error_text,
    process_lock,
    sha256_of_file,
    write_atomically,
    write_json,
)

ORDER = "pool.json"


@dataclass(frozen=True)
class PoolFolder:
    """The cards of a pool on disk by name, in order, and its base's. It may hold no expert yet."""

    root: Path
    cards: dict[str, ExpertCard]
    base: ExpertCard | None


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
    cards = {folder.name: read_card(folder) for folder in _expert_folders(root)}
    return PoolFolder(root, cards, read_card(root / BASE) if (root / BASE).is_dir() else None)


def _expert_folders(root: Path) -> list[Path]:
    """Expert folders of a pool, in the order of `pool.json`, otherwise by name.

    Refuses a folder with weights but no card, and a recorded expert without a folder.
    """
    experts = []
    for folder in subfolders(root):
        weights = [p.name for p in folder.iterdir() if p.name == WEIGHTS or p.suffix in PICKLES]
        if is_expert_folder(folder) and folder.name != BASE:
            experts.append(folder)
        elif weights and not is_expert_folder(folder):
            raise PoolError(f"{folder} holds {weights[0]} but no {CARD}. Ask the site for the whole expert folder.")
    order = read_order(root)
    missing = [name for name in order if name not in {folder.name for folder in experts}]
    if missing:
        raise PoolError(f"{root / ORDER} lists the expert '{missing[0]}', but its folder is not there.")
    return sorted(experts, key=lambda folder: order.index(folder.name) if folder.name in order else len(order))


def is_expert_folder(path: Path) -> bool:
    return (path / CARD).is_file()


def subfolders(root: Path) -> list[Path]:
    """All folders in a pool but hidden ones, by name."""
    return [path for path in sorted(root.glob("*")) if path.is_dir() and not path.name.startswith(".")]


def read_order(root: Path) -> list[str]:
    """Names in the recorded order; none where no order is recorded."""
    return list(read_checked(root / ORDER, "pool")["order"]) if (root / ORDER).exists() else []


def write_order(root: Path, names: Sequence[str]) -> None:
    """Record the order of a pool's experts: coefficients and states go by position. A recommendation stays."""
    write_pool_file(root, names, read_recommendation(root))


def read_recommendation(root: Path) -> dict[str, Any] | None:
    """The method that 'mergestream choose' recommends for a pool, with its numbers; None where none is recorded."""
    return read_checked(root / ORDER, "pool").get("recommendation") if (root / ORDER).exists() else None


def write_recommendation(root: Path, recommendation: dict[str, Any]) -> None:
    """Record a recommendation beside the order of the pool's experts, which is made explicit."""
    with locked_pool(root) as present:
        write_pool_file(present.root, list(present.cards), recommendation)


def write_pool_file(root: Path, names: Sequence[str], recommendation: dict[str, Any] | None) -> None:
    value: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "order": list(names)}
    if recommendation is not None:
        value["recommendation"] = recommendation
        require_schema("pool", value, str(root / ORDER))
    write_json(root / ORDER, value)


def candidates_folder(root: Path) -> Path:
    """The folder of a pool's candidate runs, beside the pool."""
    whole = root.resolve()
    return whole.with_name(f"{whole.name}.candidates")


def require_some(experts: Mapping[str, object]) -> None:
    """Refuse an empty pool and names that cannot be an expert's."""
    if not experts:
        raise PoolError("A pool needs at least one expert; none was given.")
    if BASE in experts:
        raise PoolError(f"An expert cannot be called '{BASE}': that folder holds the shared start.")
    for name in experts:
        require_name(name)


def require_new_folder(out: Path) -> None:
    """Refuse an output folder that exists, or whose name cannot be an expert's."""
    require_some({out.name: out})
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise OutputError(f"{out} exists already and is not overwritten. Choose a new folder.")


# --- changes ------------------------------------------------------------------------------------------------


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


def copy_expert(folder: Path, source: Path, card: ExpertCard) -> None:
    """Copy an expert's files into `folder` and check their hash again."""
    for name in (WEIGHTS, STATISTICS):
        if (source / name).is_file():
            write_atomically(folder / name, partial(shutil.copyfile, source / name))
    if sha256_of_file(folder / WEIGHTS) != card.weights_sha256:
        raise CheckpointError(f"{source / WEIGHTS} changed while it was read. Try again.")
    write_json(folder / CARD, card.to_json())


# --- previous versions --------------------------------------------------------------------------------------


def versions_folder(root: Path) -> Path:
    whole = root.resolve()
    return whole.with_name(f"{whole.name}.versions")


def previous_versions(root: Path, expert: str) -> dict[int, Path]:
    """Folders of the versions that are no longer in use, oldest first."""
    folders = [path for path in (versions_folder(root) / expert).glob("*") if path.is_dir()]
    return dict(sorted((int(path.name), path) for path in folders if re.fullmatch("[0-9]+", path.name)))


def save_version(root: Path, card: ExpertCard) -> None:
    """Copy the expert in use to its version folder, before another replaces it."""
    versions = previous_versions(root, card.name)
    newest = max(versions, default=0)
    # A process killed between saving and replacing has saved it already.
    if newest and _content(versions[newest]) == _content(root / card.name):
        return
    with atomic_folder(versions_folder(root) / card.name / str(newest + 1), lambda _: False) as scratch:
        copy_expert(scratch, root / card.name, card)


def _content(folder: Path) -> tuple[object, ...]:
    files = [folder / name for name in (WEIGHTS, STATISTICS)]
    return ExpertCard.read(folder), *(sha256_of_file(path) if path.is_file() else None for path in files)
