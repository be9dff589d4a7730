"""Pools: trained where they are missing, opened on the device, with statistics and with one expert made hostile."""

import json
import time
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from recipes import LOUDNESS, PoolSpec, Profile, recipe_of

from mergestream.bench.engine.sources import sources_for
from mergestream.data.datasets import Dataset, DomainData
from mergestream.data.datasets.data_request import DataRequest, open_data
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics.measurement import measure_statistics
from mergestream.runtime.files import write_json
from mergestream.runtime.parallel import quiet
from mergestream.training import split
from mergestream.training.training_candidates import work_folder
from mergestream.training.training_plan import plan_from
from mergestream.training.training_run import run_training


@dataclass(frozen=True, eq=False)
class Place:
    """Where everything lies, and on which device it is run."""

    out: Path
    roots: tuple[tuple[str, Path], ...]  # by data set
    init: str
    device: str
    profile: Profile
    steps: int | None = None  # of training, for a try
    kept: dict[Any, Any] = field(default_factory=dict)  # targets on the device

    def folder(self, pool: PoolSpec) -> Path:
        return self.out / "pools" / pool.name

    def note(self, pool: PoolSpec) -> Path:
        return self.out / "pools" / f"{pool.name}.json"

    @property
    def data(self) -> Path:
        return self.out / "data"


def known_note(place: Place, pool: PoolSpec) -> dict[str, Any] | None:
    """What is written down of a pool that is trained; None before that."""
    path = place.note(pool)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() and place.folder(pool).is_dir() else None


def train(place: Place, pool: PoolSpec) -> dict[str, Any]:
    """Train what is missing of a pool, then note its fingerprint: all rows of it will carry that."""
    began = time.perf_counter()
    folder = place.folder(pool)
    _share_images(place, folder)
    own = place.profile.sets[pool.dataset]
    plan = plan_from(
        dataset=pool.dataset, root=dict(place.roots)[pool.dataset], data_options=[], skip_bad=0,
        allow_missing_classes=False, network=place.profile.network, arguments=list(own.arguments), init=place.init,
        settings="one", start=recipe_of(place.profile, pool, place.device, place.steps), head_init=pool.head_init,
        keep_every=30.0,
    )  # fmt: skip
    trained = run_training(plan, folder, quiet)
    note = {
        "fingerprint": ExpertPool.load(folder).fingerprint(),
        "seconds": round(time.perf_counter() - began, 2),
        "experts": {
            card.name: {
                "best_step": card.metrics["best_step"],
                "accuracy": card.metrics["validation"]["accuracy"],
                "balanced_accuracy": card.metrics["validation"]["balanced_accuracy"],
                "temperature": card.temperature,
            }
            for card, _ in trained
        },
    }
    write_json(place.note(pool), note)
    return note


def _share_images(place: Place, folder: Path) -> None:
    """Training decodes images beside its pool; all pools of this benchmark take one place instead."""
    cache = work_folder(folder) / "cache"
    (place.data / "cache").mkdir(parents=True, exist_ok=True)
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.symlink_to((place.data / "cache").resolve(), target_is_directory=True)


class OpenPool:
    """A trained pool on the device: in bf16 on a GPU, in fp32 on a CPU."""

    def __init__(self, place: Place, spec: PoolSpec) -> None:
        self.spec, self._place = spec, place
        self.fingerprint: str = (known_note(place, spec) or train(place, spec))["fingerprint"]
        self._precise = ExpertPool.load(place.folder(spec), device=place.device)
        half = torch.bfloat16 if place.device == "cuda" else None
        self.whole = self._precise.to(dtype=half)
        assert self.whole.preprocessing is not None
        request = DataRequest(spec.dataset, str(dict(place.roots)[spec.dataset]))
        self.dataset: Dataset = open_data(request, self.whole.preprocessing, place.data)

    def sources(self, targets: tuple[str, ...]) -> ExpertPool:
        """The pool without the targets' experts; whatever else has seen a target is refused."""
        return self._without(self.whole, targets)

    def measured(self, targets: tuple[str, ...]) -> ExpertPool:
        """The same with Gram matrices and Fisher information of the experts' own training images."""
        return self._without(self._measured, targets)

    def measured_by_blocks(self, targets: tuple[str, ...]) -> ExpertPool:
        """The sources in fp32 with RegMean++'s matrices, which belong to just these experts and this precision."""
        pool = self._without(self._precise, targets)
        images = {card.name: self._own_images(card, "gram_pp") for card in pool.cards}
        return measure_statistics(pool, images, ["gram_pp"])

    def _without(self, pool: ExpertPool, targets: tuple[str, ...]) -> ExpertPool:
        data = [self.dataset[target] for target in targets]
        folder = self._place.folder(self.spec)
        return sources_for(pool, folder, targets, data, leave_out=True, allow_seen=False)

    @cached_property
    def _measured(self) -> ExpertPool:
        pool = self._precise
        for kind in ("gram", "fisher_exact"):
            pool = measure_statistics(pool, {c.name: self._own_images(c, kind) for c in pool.cards}, [kind])
        return self.whole.with_statistics(
            {name: own for name, own in zip(pool.names, pool.statistics, strict=True) if own is not None}
        )

    def _own_images(self, card: ExpertCard, kind: str) -> torch.Tensor:
        """Some of the images that an expert was trained on, as `mergestream train --statistics` takes them."""
        data: DomainData = self.dataset[str(card.domain)]
        training, _ = split(len(data), card.recipe["validation_share"], int(card.recipe["seed"]), data.groups)
        return data.batch(training[: self._place.profile.statistics[kind]])


# Units come pool by pool; the one before is let go of.
@lru_cache(maxsize=1)
def open_pool(place: Place, spec: PoolSpec) -> OpenPool:
    return OpenPool(place, spec)


def with_loud_head(pool: ExpertPool, expert: int) -> ExpertPool:
    """The pool in which one expert's head is multiplied: it says the same, but shouts."""
    bank = pool.bank.clone()
    bank[expert, pool.layout.encoder_size :] *= LOUDNESS
    return pool._with(bank=bank)
