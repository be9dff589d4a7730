"""Statistics of a pool's experts, each measured on its own site's training images and stored in its folder."""

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from mergestream.data.datasets import DataRequest, open_data
from mergestream.data.datasets.domain_data import DomainData
from mergestream.data.datasets.image_trees import plain_name
from mergestream.networks.blocks import find_blocks
from mergestream.pool.checkpoint import SIGNATURE, Statistics, write_statistics
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics.measurement import (
    BLOCKWISE,
    KINDS,
    REGMEAN_PP,
    blockwise_kind,
    existing_statistics,
    measure_statistics,
)
from mergestream.runtime.devices import resolve_device
from mergestream.runtime.errors import PoolError, unknown_name
from mergestream.runtime.option_checks import one_of, whole_number
from mergestream.runtime.parallel import Advance, Track, quiet
from mergestream.training.training_loop import split_of

# The paper's: 50 batches of 32 images for RegMean(++), 500 images for Fisher merging in FusionBench's form.
PAPER_IMAGES = {"gram": 1600, "fisher_mergelm": 500, BLOCKWISE: 1600}
EACH, NOBODY = "all", "none"  # pools for RegMean++: every one without one expert; the whole pool
BATCH_SIZE = 32  # the FusionBench Fisher information depends on it
GPU_BATCH_SIZE = 128  # Gram matrices do not depend on it: fewer, larger products
# Every write copies the whole file, so results wait in memory until this many seconds have passed, or until they fill
# this many bytes and a quarter of the memory that is free.
WRITE_AFTER_SECONDS, WRITE_AFTER_BYTES = 120.0, 4 << 30


def measure_pool(
    folder: Path,
    request: DataRequest,
    work: Path,
    images: Mapping[str, int],
    device: str = "auto",
    experts: Collection[str] = (),
    leave_out: Sequence[str] = (EACH,),
    track: Track = quiet,
) -> dict[str, dict[str, int]]:
    """Measure what is missing, write it into the experts' folders, and return each expert's images by kind.

    `images`: how many training images per expert, by kind. RegMean++'s kind 'gram_pp' belongs to one set of experts:
    `leave_out` names the domains that are left out of each ('a', or 'a+b' for two), 'all' for every single one, 'none'
    for the whole pool. `experts` limits the other kinds to some experts. `work`: folder of the decoded images.
    """
    pool = ExpertPool.load(folder, device=resolve_device(device))
    for kind, count in images.items():
        one_of("kind of statistics", kind, KINDS)
        whole_number(kind, count, low=1)
    for name in experts:
        pool.index(name)
    sites = _Sites(pool, request.of_pool(pool.classes), work)
    results = _Results(folder, pool)
    for kind in (kind for kind in images if kind != BLOCKWISE):
        counts = {name: sites.count(name, images[kind]) for name in experts or pool.names}
        missing = results.missing(kind, counts)
        size = _batch_size(kind, pool)
        with track(f"measuring {kind}", sum(ceil(count / size) for count in missing.values())) as advance:
            for name, count in missing.items():
                own = {name: sites.images(name, count)}
                results.add(_measure(results.blank, own, kind, advance))
    groups = left_out_experts(pool, leave_out) if BLOCKWISE in images else []
    blocks, size = len(find_blocks(pool.template.module)) if groups else 0, _batch_size(BLOCKWISE, pool)
    for absent in groups:
        rest = results.blank.without(*absent) if absent else results.blank
        counts = {name: sites.count(name, images[BLOCKWISE]) for name in rest.names}
        kind = blockwise_kind(rest, REGMEAN_PP)
        if results.missing(kind, counts):
            title = f"measuring RegMean++ {'without ' + ', '.join(absent) if absent else 'of the whole pool'}"
            with track(title, blocks * sum(ceil(count / size) for count in counts.values())) as advance:
                own = {name: sites.images(name, count) for name, count in counts.items()}
                results.add(_measure(rest, own, BLOCKWISE, advance))
    results.write()
    return results.counts


def left_out_experts(pool: ExpertPool, leave_out: Sequence[str]) -> list[tuple[str, ...]]:
    """The experts that each RegMean++ pool lacks, by domains as in `measure_pool`; each set once."""
    by_domain: dict[str, list[str]] = {}
    for card in pool.cards:
        by_domain.setdefault(plain_name(card.domain or card.name), []).append(card.name)
    groups: list[tuple[str, ...]] = []
    for text in leave_out:
        domains = {EACH: list(by_domain), NOBODY: [""]}.get(text, [text])
        for absent in domains:
            plain = [plain_name(domain) for domain in absent.split("+") if domain]
            for domain in plain:
                if domain not in by_domain:
                    raise unknown_name("domain of this pool's experts", domain, by_domain)
            groups.append(tuple(name for name in pool.names if any(name in by_domain[each] for each in plain)))
    rests = [group for group in dict.fromkeys(groups) if len(group) < len(pool)]
    if not rests:
        raise PoolError(f"Without {', '.join(leave_out)} nothing is left of the pool {list(pool.names)}.")
    return rests


def _batch_size(kind: str, pool: ExpertPool) -> int:
    return GPU_BATCH_SIZE if pool.device.type == "cuda" and not kind.startswith("fisher") else BATCH_SIZE


def _measure(pool: ExpertPool, images: dict[str, Tensor], kind: str, advance: Advance) -> dict[str, Statistics]:
    size = _batch_size(kind, pool)
    measured = measure_statistics(pool, images, (kind,), batch_size=size, on_batch=advance, **REGMEAN_PP)
    return {name: existing_statistics(measured, measured.index(name)) for name in images}


class _Sites:
    """The experts' own training images: those of the validation split are never measured."""

    def __init__(self, pool: ExpertPool, request: DataRequest, work: Path) -> None:
        self._dataset = open_data(request, pool.template.require_preprocessing(), work)
        self._cards = {card.name: card for card in pool.cards}
        self._opened: dict[str, tuple[DomainData, Tensor]] = {}

    def _site(self, name: str) -> tuple[DomainData, Tensor]:
        """A site's images and the indices of its training split, opened at first use."""
        if name not in self._opened:
            card = self._cards[name]
            data = self._dataset[card.domain or name]
            if "validation_share" in card.recipe:
                training, _ = split_of(data, card.recipe)
            else:  # an imported expert: its split is unknown
                training = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
            self._opened[name] = data, training
        return self._opened[name]

    def count(self, name: str, images: int) -> int:
        return min(images, len(self._site(name)[1]))

    def images(self, name: str, count: int) -> Tensor:
        data, training = self._site(name)
        return data.batch(training[:count])


@dataclass
class _Results:
    """New statistics on their way to the experts' folders, beside what is there already."""

    folder: Path
    pool: ExpertPool

    def __post_init__(self) -> None:
        experts = range(len(self.pool))
        self.counts = {self.pool.names[k]: dict(existing_statistics(self.pool, k).images) for k in experts}
        # Measured without the old ones in memory: they are gigabytes for a large network.
        self.blank = self.pool.with_statistics({name: Statistics({}, {}) for name in self.pool.names})
        self._new = {name: Statistics({}, {}) for name in self.pool.names}
        self._written = time.monotonic()

    def missing(self, kind: str, images: Mapping[str, int]) -> dict[str, int]:
        """Which experts lack this kind from so many images. A signed folder is refused: the signature covers it."""
        lacking = {name: count for name, count in images.items() if self.counts[name].get(kind) != count}
        for name in lacking:
            if (self.folder / name / SIGNATURE).exists():
                raise PoolError(
                    f"'{name}' is signed, and its signature covers the statistics. Remove its {SIGNATURE}, measure, "
                    f"and sign it again."
                )
        return lacking

    def add(self, measured: Mapping[str, Statistics]) -> None:
        for name, own in measured.items():
            for kind, count in own.images.items():
                tensors = {key: tensor.cpu() for key, tensor in own.of(kind)}
                self._new[name] = self._new[name].with_kind(kind, tensors, count)
                self.counts[name][kind] = count
        waiting = sum(tensor.nbytes for own in self._new.values() for tensor in own.tensors.values())
        if (
            waiting > max(WRITE_AFTER_BYTES, _free_memory() // 4)
            or time.monotonic() - self._written > WRITE_AFTER_SECONDS
        ):
            self.write()

    def write(self) -> None:
        """Add what is new to the experts' files, two files at a time: gigabytes that a disk takes slowly."""
        changed = [name for name, new in self._new.items() if new.images]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(self._write_expert, changed))
        self._written = time.monotonic()

    def _write_expert(self, name: str) -> None:
        expert, new = self.pool.index(name), self._new[name]
        whole = existing_statistics(self.pool, expert)
        for kind, count in new.images.items():
            whole = whole.with_kind(kind, dict(new.of(kind)), count)
        write_statistics(self.folder / name, whole, self.pool.cards[expert])
        self._new[name] = Statistics({}, {})


def _free_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # not Linux
        return 0


def describe_counts(counts: Mapping[str, Mapping[str, int]]) -> Iterable[str]:
    """One line per expert: its kinds of statistics and from how many images."""
    for name, kinds in counts.items():
        pools = {kind: count for kind, count in kinds.items() if kind.startswith(f"{BLOCKWISE}-")}
        parts = [f"{kind} ({count} images)" for kind, count in kinds.items() if kind not in pools]
        parts += [f"{BLOCKWISE} for {len(pools)} pools ({max(pools.values())} images)"] if pools else []
        yield f"{name}: {', '.join(parts) or 'none'}"
