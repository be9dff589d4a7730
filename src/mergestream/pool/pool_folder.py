"""A pool's folder: its cards in order, changes that happen whole or not at all, and previous versions beside it."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from mergestream.pool import expert_card
from mergestream.pool.checkpoint import EXPERT_FILES, PICKLES, README, SIGNATURE, STATISTICS, WEIGHTS, write_card
from mergestream.pool.expert_card import BASE, CARD, ExpertCard
from mergestream.runtime.errors import CheckpointError, InputError, MissingPathError, OutputError, PoolError
from mergestream.runtime.files import (
    atomic_folder,
    error_text,
    process_lock,
    sha256_if_file,
    sha256_of_file,
    write_atomically,
    write_json,
)

if TYPE_CHECKING:
    from mergestream.pool.trust.trusted_signers import SignedFiles, TrustedSigners

ORDER = "pool.json"


@dataclass(frozen=True)
class PoolFolder:
    """The cards of a pool on disk by name, in order, and its base's. It may hold no expert yet."""

    root: Path
    cards: dict[str, ExpertCard]
    base: ExpertCard | None
    signed: "Mapping[str, SignedFiles]" = field(default_factory=dict)  # of every folder, where signatures were checked

    def hashes(self, name: str) -> Mapping[str, str] | None:
        """sha-256 of an expert's files as signed; None where signatures were not checked."""
        return self.signed[name].sha256 if name in self.signed else None


def pool_root(pool: Path) -> Path:
    """The pool's real path, links followed."""
    root = pool.resolve()
    if not root.is_dir():
        raise MissingPathError(
            f"There is no pool at {pool}. For a new one, make that folder and put the shared start in base/."
        )
    return root


def read_pool(pool: Path, trusted: "TrustedSigners | None" = None) -> PoolFolder:
    """Read the cards of a pool on disk. `trusted`: who must have signed every expert and the base."""
    root = pool_root(pool)
    if is_expert_folder(root):
        raise MissingPathError(f"{pool} is one expert's folder, not a pool. Give the folder that holds it.")
    folders = [*_expert_folders(root), *([root / BASE] if (root / BASE).is_dir() else [])]
    signed = {folder.name: trusted.signed_expert(folder) for folder in folders} if trusted else {}
    hashes = {name: files.sha256.get(CARD) for name, files in signed.items()}
    cards = {folder.name: expert_card.read_card(folder, hashes.get(folder.name)) for folder in folders}
    base = cards.pop(BASE, None)
    return PoolFolder(root, cards, base, signed)


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
    return list(expert_card.read_checked(root / ORDER, "pool")["order"]) if (root / ORDER).exists() else []


def write_order(root: Path, names: Sequence[str]) -> None:
    """Record the order of a pool's experts: coefficients and states go by position. A recommendation stays."""
    write_pool_file(root, names, read_recommendation(root))


def read_recommendation(root: Path) -> dict[str, Any] | None:
    """The method that 'mergestream choose' recommends for a pool, with its numbers; None where none is recorded."""
    return expert_card.read_checked(root / ORDER, "pool").get("recommendation") if (root / ORDER).exists() else None


def write_recommendation(root: Path, recommendation: dict[str, Any]) -> None:
    """Record a recommendation beside the order of the pool's experts, which is made explicit."""
    with locked_pool(root) as present:
        write_pool_file(present.root, list(present.cards), recommendation)


def write_pool_file(root: Path, names: Sequence[str], recommendation: dict[str, Any] | None) -> None:
    value: dict[str, Any] = {"schema_version": expert_card.SCHEMA_VERSION, "order": list(names)}
    if recommendation is not None:
        value["recommendation"] = recommendation
        expert_card.require_schema("pool", value, str(root / ORDER))
    write_json(root / ORDER, value)


def candidates_folder(root: Path) -> Path:
    """The folder of a pool's candidate runs, beside the pool."""
    whole = root.resolve()
    return whole.with_name(f"{whole.name}.candidates")


def require_named(experts: Mapping[str, object], what: str) -> None:
    """Refuse what is not a mapping of names to experts, and names that cannot be an expert's."""
    if not hasattr(experts, "items"):
        raise InputError(f"Give the {what} by name: {{'lyon': …, 'brest': …}}; got {type(experts).__name__}.")
    require_some(experts)


def require_named_modules(modules: Mapping[str, object]) -> None:
    require_named(modules, "modules")
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            other = " Use from_state_dicts for state dicts." if isinstance(module, Mapping) else ""
            raise InputError(f"Expert '{name}' is not an nn.Module but a {type(module).__name__}.{other}")


def require_some(experts: Mapping[str, object]) -> None:
    """Refuse an empty pool and names that cannot be an expert's."""
    if not experts:
        raise PoolError("A pool needs at least one expert; none was given.")
    if BASE in experts:
        raise PoolError(f"An expert cannot be called '{BASE}': that folder holds the shared start.")
    for name in experts:
        expert_card.require_name(name)


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
    """Copy an expert's files into `folder` and check their hash again. A signature of another card is left out."""
    same_card = card == ExpertCard.read(source)
    for name in (*EXPERT_FILES, SIGNATURE):
        if (source / name).is_file() and (same_card or name not in (CARD, README, SIGNATURE)):
            write_atomically(folder / name, partial(shutil.copyfile, source / name))
    if sha256_of_file(folder / WEIGHTS) != card.weights_sha256:
        raise CheckpointError(f"{source / WEIGHTS} changed while it was read. Try again.")
    if not same_card:
        write_card(folder, card)


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
    if newest and content_of(versions[newest]) == content_of(root / card.name):
        return
    with atomic_folder(versions_folder(root) / card.name / str(newest + 1), lambda _: False) as scratch:
        copy_expert(scratch, root / card.name, card)


def content_of(folder: Path) -> tuple[object, ...]:
    """The card and the hashes of an expert's other files, to compare two folders."""
    files = [folder / name for name in (WEIGHTS, STATISTICS, SIGNATURE)]
    return ExpertCard.read(folder), *map(sha256_if_file, files)
