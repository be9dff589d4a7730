"""The work at one target with one pool: open both, compute the experts' logits once, answer every stream."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.bench.engine.plan import BenchPlan, Target
from mergestream.bench.engine.sources import sources_for
from mergestream.bench.engine.variants import Variant
from mergestream.bench.evaluation import describe_run, domain_logits, evaluate_streams
from mergestream.bench.records import is_finished, run_hash
from mergestream.data.datasets import Dataset, DomainData, concatenate
from mergestream.data.datasets.opening import open_data
from mergestream.data.streams import Stream, create_stream
from mergestream.methods import METHODS, ORIGINAL, Method, create_method
from mergestream.networks.preprocessing import Preprocessing
from mergestream.networks.views import require_known
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, PoolError
from mergestream.runtime.files import mapped_array, sha256_of_json, write_atomically
from mergestream.runtime.option_checks import names

RUNS, CACHE = "runs", "cache"
# Raised whenever the same pool and images would give other logits: what is cached is then computed again.
LOGITS_REVISION = 1


@dataclass(frozen=True)
class Task:
    """One variant at one target with one pool: its runs' folders, and whether any is still to be done."""

    variant: Variant
    label: str
    folders: tuple[Path, ...]
    to_do: bool


@dataclass(frozen=True)
class Survey:
    """What there is to do at one target with one pool, and which methods cannot be run there, with the reason."""

    tasks: tuple[Task, ...]
    impossible: tuple[tuple[str, str], ...]


class Case:
    """One target and one pool, opened."""

    def __init__(self, plan: BenchPlan, out: Path, pool: str, target: Target) -> None:
        self.plan, self.out, self.target = plan, out, target
        whole = load_pool(pool, plan.device)
        self.dataset = open_data(plan.data, preprocessing_of(whole, pool), out)
        every = [self.dataset[domain] for domain in target.domains]
        self.pool = sources_for(
            whole, Path(pool), target.domains, every, leave_out=plan.protocol == "lodo", allow_seen=plan.allow_seen
        )
        self._left_out = set(whole.names) - set(self.pool.names)
        parts = [_some(data, plan.data.images) for data in every]
        if len(self.pool) < 2 and any(spec.startswith("mixture") for spec in target.streams):
            left = f"only '{self.pool.names[0]}' is left"
            raise InputError(
                f"Without the experts of {target.name} {left}: a mixture of targets needs two experts or more."
            )
        self.data, domains = concatenate(parts) if len(parts) > 1 else (parts[0], [parts[0].name] * len(parts[0]))
        streams = ((seed, self._stream(spec, seed, domains)) for spec in target.streams for seed in plan.seeds)
        # 'note' and 'note:0.1' are one stream.
        self.streams = list({(seed, stream.name): (seed, stream) for seed, stream in streams}.values())

    def _stream(self, spec: str, seed: int, domains: list[str]) -> Stream:
        known = {"acquired": self.data.acquired, "domains": domains if len(self.target.domains) > 1 else None}
        return create_stream(spec, self.data.labels, batch_size=self.plan.batch_size, seed=seed, **known)

    def variants(self) -> list[Variant]:
        """Those of the plan. A single expert that is not named stands for each; one that is left out does not run."""
        found: list[Variant] = []
        alone = [Variant("single_expert", (("expert", name),)) for name in self.pool.names]
        for variant in self.plan.variants:
            found += alone if variant == Variant("single_expert") else [variant]
        found += alone if self.plan.every_expert else []
        return [v for v in dict.fromkeys(found) if dict(v.options).get("expert") not in self._left_out]

    def method(self, variant: Variant) -> Method:
        return method_of(variant, self.pool, self.dataset)

    def wanted(self, method: Method) -> list[tuple[Stream, dict[str, Any]]]:
        """Every stream with its run's arguments."""
        return [
            (stream, {**describe_run(method, self.data, stream), **self._said(seed)}) for seed, stream in self.streams
        ]

    def _said(self, seed: int) -> dict[str, Any]:
        plan = self.plan
        return {
            "seed": seed,
            "batch_size": plan.batch_size,
            "protocol": plan.protocol,
            **({"allow_seen": True} if plan.allow_seen else {}),
        }

    def logits(self, view: str) -> Tensor:
        """Expert logits [K,N,C] of the target in one view, computed once for all methods and kept on disk."""
        path = self.out / CACHE / "logits" / f"{self._logits_key(view)}.npy"
        known = mapped_array(path)
        if known is None:
            computed = known = domain_logits(self.pool, self.data, view).numpy()
            write_atomically(path, lambda temporary: _save_array(temporary, computed))
        return torch.from_numpy(known)

    def _logits_key(self, view: str) -> str:
        return sha256_of_json([LOGITS_REVISION, self.pool.fingerprint(), self.data.fingerprint(), view])[:32]

    @cached_property
    def known_logits(self) -> dict[str, Tensor]:
        """Those that lie on disk already."""
        views = (ORIGINAL, *self.dataset.views)
        there = [v for v in views if (self.out / CACHE / "logits" / f"{self._logits_key(v)}.npy").exists()]
        return {view: self.logits(view) for view in there}


def survey(plan: BenchPlan, out: Path, pool: str, target: Target) -> Survey:
    """Find out what is to be done at a target; if anything is, compute the experts' logits first."""
    case = open_case(plan, out, pool, target)
    tasks: list[Task] = []
    impossible, views = [], {ORIGINAL}
    for variant in case.variants():
        try:
            method = case.method(variant)
            wanted = case.wanted(method)
        except (PoolError, InputError) as error:
            if not plan.skip_impossible:
                raise
            impossible.append((str(variant), str(error)))
            continue
        folders = tuple(out / RUNS / run_hash(arguments) for _, arguments in wanted)
        if any(task.folders == folders for task in tasks):
            continue  # spelt otherwise, but the same
        tasks.append(Task(variant, method.label(), folders, not all(map(is_finished, folders))))
        views |= set(method.options().get("views", ())) if tasks[-1].to_do else set()
    if any(task.to_do for task in tasks):
        for view in sorted(views):
            case.logits(view)
    return Survey(tuple(tasks), tuple(impossible))


def answer(plan: BenchPlan, out: Path, pool: str, target: Target, variant: Variant) -> None:
    """Run one variant on every stream of one target that is not done yet."""
    case = open_case(plan, out, pool, target)
    method = case.method(variant)
    evaluate_streams(method, case.data, case.wanted(method), out / RUNS, case.known_logits, batch_size=plan.batch_size)


# A worker gets one job after the other of the same target: it opens what they share once.
@lru_cache(maxsize=1)
def open_case(plan: BenchPlan, out: Path, pool: str, target: Target) -> Case:
    return Case(plan, out, pool, target)


@lru_cache(maxsize=1)  # the same for one target after the other
def load_pool(folder: str, device: str) -> ExpertPool:
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("There is no CUDA device here: --device cpu, or auto.")
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return ExpertPool.load(folder, device=chosen)


def preprocessing_of(pool: ExpertPool, folder: str) -> Preprocessing:
    if pool.preprocessing is None:
        raise PoolError(
            f"The pool {folder} does not say how images are prepared for its network; save it with preprocessing=."
        )
    return pool.preprocessing


def forget_what_was_opened() -> None:
    open_case.cache_clear()
    load_pool.cache_clear()
    open_data.cache_clear()


def method_of(variant: Variant, pool: ExpertPool, dataset: Dataset) -> Method:
    """A variant on a pool, with views that keep the data set's labels true."""
    options = dict(variant.options)
    if "views" in METHODS[variant.method].option_names():
        options["views"] = views_for(variant, dataset)
    return create_method(variant.method, pool, **options)


def views_for(variant: Variant, dataset: Dataset) -> tuple[str, ...]:
    """The views asked for, if they keep this data set's labels true; else its first one in place of the default."""
    asked = dict(variant.options).get("views")
    if asked is not None:
        named = require_known(names("views", asked))
        wrong = [view for view in named if view not in dataset.views]
        if wrong:
            raise InputError(
                f"The view '{wrong[0]}' does not keep the labels of '{dataset.name}' true; its views: "
                f"{', '.join(dataset.views)}."
            )
        return named
    return ("hflip",) if "hflip" in dataset.views else dataset.views[:1]


def _some(data: DomainData, count: int | None) -> DomainData:
    """At most `count` images, the same ones always: a seeded choice that keeps their order."""
    if count is None or count >= len(data):
        return data
    chosen = np.sort(np.random.RandomState(0).permutation(len(data))[:count])
    return data.subset(torch.from_numpy(chosen))


def _save_array(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array)
