"""One pool at one target, opened: experts that may answer there, streams, methods, and the experts' logits."""

import io
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.bench.engine.plan import BenchPlan, Target
from mergestream.bench.evaluation import describe_run, domain_logits
from mergestream.data.datasets import Dataset, DomainData, concatenate, open_data
from mergestream.data.datasets.image_trees import plain_name
from mergestream.data.streams import Stream, create_stream, parse_stream
from mergestream.methods import METHODS, ORIGINAL, Method, create_method
from mergestream.methods.recommendation import DEFAULT, site_of
from mergestream.methods.spelling import BASE_OPTION, Variant, default_base, parse_variant
from mergestream.networks.preprocessing import view_names
from mergestream.pool.expert_card import BASE, CARD, read_card
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.devices import resolve_device
from mergestream.runtime.errors import InputError, PoolError
from mergestream.runtime.files import mapped_array, sha256_of_json, write_atomically

CACHE = "cache"
# Raised whenever the same pool and images would give other logits: what is cached is then computed again.
LOGITS_REVISION = 1


def sources_for(
    pool: ExpertPool,
    folder: Path,
    targets: Collection[str],
    data: Collection[DomainData],
    *,
    leave_out: bool,
    allow_seen: bool,
) -> ExpertPool:
    """The pool without the targets' own experts (`leave_out`); whatever else has seen a target is refused.

    Looked at are the domains in the cards, however they are spelt, and the hash of the images each was trained on: of
    the experts, of the runs they were chosen from, and of the base they started from. With `allow_seen` all stay.
    """
    if allow_seen:
        return pool
    rest = without_own(pool, targets, leave_out=leave_out)
    require_unseen(rest, folder, targets, data)
    return rest


def without_own(pool: ExpertPool, targets: Collection[str], *, leave_out: bool) -> ExpertPool:
    """The pool without the targets' own site reports and experts (`leave_out`)."""
    own = trained_at(pool, targets) if leave_out else []
    if len(own) == len(pool):
        raise PoolError(f"Without the experts of {'+'.join(targets)} nothing is left of the pool {list(pool.names)}.")
    return _without_reports(pool.without(*own) if own else pool, targets)


def require_unseen(rest: ExpertPool, folder: Path, targets: Collection[str], data: Collection[DomainData]) -> None:
    """Refuse experts, candidates and a base that have seen a target."""
    runs = rest.candidates.cards if rest.candidates is not None else ()
    base = [read_card(folder / BASE)] if (folder / BASE / CARD).exists() else []
    fingerprints = {part.fingerprint() for part in data}
    for kind, cards in {"expert": rest.cards, "candidate": runs, "base": base}.items():
        for card in cards:
            trained = _plain(site_of(card).split("+")) & _plain(targets)
            if trained or card.recipe.get("data") in fingerprints:
                raise PoolError(
                    f"Leakage: the {kind} '{card.name}' was trained on the target {'+'.join(targets)}, so its answers "
                    f"say nothing about an unseen site. Take it out of the pool, or allow it with --allow-seen."
                )


def _without_reports(pool: ExpertPool, targets: Collection[str]) -> ExpertPool:
    """The pool without what site reports say about the targets."""
    value = pool.recommendation or {}
    others = [each for each in value.get("sites", []) if plain_name(each["site"]) not in _plain(targets)]
    if len(others) == len(value.get("sites", [])):
        return pool
    return pool._with(recommendation={**value, "sites": others})


def trained_at(pool: ExpertPool, targets: Collection[str]) -> list[str]:
    """Experts whose domain is one of these, however it is spelt."""
    return [card.name for card in pool.cards if plain_name(site_of(card)) in _plain(targets)]


def experts_of_other_domains(pool: ExpertPool, domains: Collection[str]) -> list[str]:
    """Experts whose domain is none of these: it does not show what they have seen."""
    return [card.name for card in pool.cards if not _plain(site_of(card).split("+")) & _plain(domains)]


def _plain(names: Iterable[str]) -> set[str]:
    return {plain_name(name) for name in names}


class TargetMethods:
    """The experts that may answer at a target, and the plan's methods made from them: each is constructed once."""

    def __init__(self, plan: BenchPlan, whole: ExpertPool, target: Target, loud_head: float) -> None:
        leave_out = plan.protocol == "lodo"
        self.pool = whole if plan.allow_seen else without_own(whole, target.domains, leave_out=leave_out)
        if loud_head != 1:  # the same predictions, but larger logits
            bank = self.pool.bank.clone()
            bank[0, self.pool.layout.encoder_size :] *= loud_head
            self.pool = self.pool._with(bank=bank)
        self._methods: dict[Variant, Method] = {}

    def method(self, variant: Variant, dataset: Dataset) -> Method:
        if variant not in self._methods:
            self._methods[variant] = method_of(variant, self.pool, dataset)
        return self._methods[variant]

    def take(self, variant: Variant, dataset: Dataset) -> Method:
        """A method to run, which is not kept: its merged weights are as large as an expert."""
        return self._methods.pop(variant, None) or method_of(variant, self.pool, dataset)


class PoolAtTarget:
    """One pool and one target, opened. A loud head is one of the plan's factors of the first expert's head."""

    def __init__(self, plan: BenchPlan, out: Path, pool: str, target: Target, loud_head: float) -> None:
        self.plan, self.loud_head = plan, loud_head
        self._logits_folder = out / CACHE / "logits"
        whole = load_pool(pool, plan.device, plan.dtype)
        self.dataset = open_data(plan.data, whole.template.require_preprocessing(), out)
        every = [self.dataset[domain] for domain in target.domains]
        self.methods = target_methods(plan, pool, target, loud_head)
        self.pool = self.methods.pool
        if not plan.allow_seen:
            require_unseen(self.pool, Path(pool), target.domains, every)
        self.variants = variants_at(plan, whole, target)
        if len(self.pool) < 2 and any(parse_stream(spec).needs_domains for spec in target.streams):
            raise InputError(
                f"Without the experts of {target.name} only '{self.pool.names[0]}' is left: a stream of several "
                f"targets needs two experts or more."
            )
        parts = [some_images(data, plan.data.images) for data in every]
        self._domains: list[str] | None
        self.data, self._domains = concatenate(parts) if len(parts) > 1 else (parts[0], None)
        seeds = (plan.seeds[plan.pools.index(pool)],) if plan.paired_seeds else plan.seeds
        streams = [
            (seed, size, self._stream(spec, seed, size))
            for spec in target.streams
            for size in plan.batch_sizes
            for seed in seeds
        ]
        # 'note' and 'note:0.1' are one stream.
        self._streams = list({(seed, stream.name): (seed, size, stream) for seed, size, stream in streams}.values())

    def _stream(self, spec: str, seed: int, size: int) -> Stream:
        """A stream whose name tells it from those of other batch sizes and perturbations."""
        data = self.data
        columns = {"acquired": data.acquired, "groups": data.groups, "domains": self._domains, "classes": data.classes}
        try:
            stream = create_stream(spec, data.labels, batch_size=size, seed=seed, **columns)
        except InputError as error:
            raise InputError(f"The stream '{spec}' is not possible at {data.name}: {error}") from error
        name = stream.name if len(self.plan.batch_sizes) == 1 else f"{stream.name}, batch {size}"
        return replace(stream, name=name if len(self.plan.loud_heads) == 1 else f"{name}, head x{self.loud_head:g}")

    def runs(self, method: Method) -> list[tuple[Stream, dict[str, Any]]]:
        """Every stream with its run's arguments."""
        plan = self.plan
        fixed: dict[str, Any] = {"protocol": plan.protocol}
        fixed |= {key: True for key in ("allow_seen", "timed") if getattr(plan, key)}
        fixed |= {"dtype": plan.dtype} if plan.dtype != "float32" else {}
        return [
            (stream, {**describe_run(method, self.data, stream), "seed": seed, "batch_size": size, **fixed})
            for seed, size, stream in self._streams
        ]

    def logits(self, view: str) -> Tensor:
        """Expert logits [K,N,C] of the target in one view, computed once for all methods and kept on disk."""
        path = self._logits_path(view)
        stored = mapped_array(path)
        if stored is None:
            buffer = io.BytesIO()
            stored = domain_logits(self.pool, self.data, view).numpy()
            np.save(buffer, stored)
            write_atomically(path, lambda temporary: temporary.write_bytes(buffer.getbuffer()))
        return torch.from_numpy(stored)

    def _logits_path(self, view: str) -> Path:
        key = sha256_of_json([LOGITS_REVISION, self.pool.fingerprint(), self.data.fingerprint(), view])
        return self._logits_folder / f"{key[:32]}.npy"

    @cached_property
    def stored_logits(self) -> dict[str, Tensor]:
        """Logits that are on disk; none where steps are timed, so that they compute their own."""
        views = () if self.plan.timed else (ORIGINAL, *self.dataset.views)
        return {view: self.logits(view) for view in views if self._logits_path(view).exists()}


# A worker gets one job after the other of the same target: it opens what they share once.
@lru_cache(maxsize=1)
def open_target(plan: BenchPlan, out: Path, pool: str, target: Target, loud_head: float) -> PoolAtTarget:
    return PoolAtTarget(plan, out, pool, target, loud_head)


@lru_cache(maxsize=1)
def target_methods(plan: BenchPlan, pool: str, target: Target, loud_head: float) -> TargetMethods:
    return TargetMethods(plan, load_pool(pool, plan.device, plan.dtype), target, loud_head)


def variants_at(plan: BenchPlan, whole: ExpertPool, target: Target) -> list[Variant]:
    """Those of the plan. An unnamed single expert stands for each; an expert that is left out does not run."""
    left_out = trained_at(whole, target.domains) if plan.protocol == "lodo" and not plan.allow_seen else []
    alone = [Variant("single_expert", (("expert", name),)) for name in whole.names if name not in left_out]
    variants: list[Variant] = []
    for variant in plan.variants:
        variants += alone if variant == Variant("single_expert") else [variant]
    variants += alone if plan.every_expert else []
    return [v for v in dict.fromkeys(variants) if dict(v.options).get("expert") not in left_out]


@lru_cache(maxsize=1)  # the same for one target after the other
def load_pool(folder: str, device: str, dtype: str = "float32") -> ExpertPool:
    pool = ExpertPool.load(
        folder, device=resolve_device(device), dtype=None if dtype == "float32" else getattr(torch, dtype)
    )
    if len(pool.classes) < 2:
        raise PoolError(f"The pool has one class only, {pool.classes[0]!r}: it cannot tell images apart.")
    return pool


def close_all() -> None:
    """Forget pools, data and targets opened by an earlier call: their files may have changed since."""
    open_target.cache_clear()
    target_methods.cache_clear()
    load_pool.cache_clear()
    open_data.cache_clear()


def method_of(variant: Variant, pool: ExpertPool, dataset: Dataset) -> Method:
    return create_method(variant.method, pool, **_options_at(variant, dataset))


def _options_at(variant: Variant, dataset: Dataset) -> dict[str, Any]:
    """Options with views that keep the data set's labels true: by default hflip, or else its first one."""
    options, allowed = dict(variant.options), ("hflip",) if "hflip" in dataset.views else dataset.views[:1]
    if (usual := default_base(variant.method)) is not None:
        base = parse_variant(options.get(BASE_OPTION, usual))
        if BASE_OPTION not in options and dict(base.options).get("views"):
            base = Variant(base.method, (*base.options, ("views", allowed)))
        options[BASE_OPTION] = str(Variant(base.method, tuple(_options_at(base, dataset).items())))
    if "default" in METHODS[variant.method].option_names():  # of 'auto': a method, too
        rule = parse_variant(options.get("default", DEFAULT))
        options["default"] = str(Variant(rule.method, tuple(_options_at(rule, dataset).items())))
    if options.get("views") is not None:
        options["views"] = view_names("views", options["views"])
        wrong = [view for view in options["views"] if view not in dataset.views]
        if wrong:
            raise InputError(
                f"The view '{wrong[0]}' does not keep the labels of '{dataset.name}' true; its views: "
                f"{', '.join(dataset.views)}."
            )
    elif "views" in (own := METHODS[variant.method]._parameters()) and own["views"].default:
        options["views"] = allowed
    return options


def some_images(data: DomainData, count: int | None) -> DomainData:
    """At most `count` images, always the same ones: a seeded choice that keeps their order."""
    if count is None or count >= len(data):
        return data
    chosen = np.sort(np.random.RandomState(0).permutation(len(data))[:count])
    return data.subset(torch.from_numpy(chosen))
