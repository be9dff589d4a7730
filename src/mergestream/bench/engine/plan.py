"""What a benchmark runs, as data: targets, methods, streams, seeds, batch sizes and perturbed experts over pools."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from mergestream.bench.engine.variants import Variant
from mergestream.data.datasets import Dataset
from mergestream.data.datasets.data_request import DataRequest
from mergestream.data.streams import parse_stream
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.option_checks import whole_number

PROTOCOLS = ("lodo", "ood")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class BenchPlan:
    """Targets × variants × streams × seeds, over one pool or several that differ by their training's seed."""

    data: DataRequest
    pools: tuple[str, ...]
    variants: tuple[Variant, ...]
    targets: tuple[str, ...] = ("all",)
    streams: tuple[str, ...] = ("iid",)
    seeds: tuple[int, ...] = (0,)
    paired_seeds: bool = False  # the first pool sees streams of the first seed only, the second of the second, ...
    batch_sizes: tuple[int, ...] = (32,)
    loud_heads: tuple[float, ...] = (1.0,)  # factors of the first expert's head: a hostile or badly scaled expert
    protocol: str = "lodo"
    allow_seen: bool = False
    reference: str | None = None  # the method that others are compared with; entropy_adaptive, or the first one
    skip_impossible: bool = False  # leave out methods that the pool lacks something for, and say so
    device: str = "auto"
    dtype: str = "float32"
    preset: str | None = None
    every_expert: bool = True  # also run each expert alone: rows for their average and the oracle
    timed: bool = False  # steps compute the experts' logits themselves, so that their milliseconds are real

    def __post_init__(self) -> None:
        for what, value, choices in (
            ("protocol", self.protocol, PROTOCOLS),
            ("device", self.device, DEVICES),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in choices:
                raise unknown_name(what, value, choices)
        for spec in self.streams:
            parse_stream(spec)
        for size in self.batch_sizes:
            whole_number("batch_size", size, low=1)
        _require_distinct("pool", self.pools)
        _require_distinct("stream", self.streams)
        _require_distinct("batch size", self.batch_sizes)
        _require_distinct("factor of a head", self.loud_heads)
        if not self.paired_seeds:
            _require_distinct("seed", self.seeds)
        elif len(self.seeds) != len(self.pools):
            raise InputError(f"Paired seeds need one seed per pool: {len(self.pools)} pools, {len(self.seeds)} seeds.")
        methods = {name for variant in self.variants for name in (variant.method, str(variant))}
        if self.reference is not None and self.reference not in methods:
            raise unknown_name("method to compare with", self.reference, methods)
        if len({Path(pool).resolve() for pool in self.pools}) != len(self.pools):
            raise InputError(f"Two pools are one folder: {list(self.pools)}.")
        whole_number("skip_bad", self.data.skip_bad, low=0)
        if self.data.images is not None:
            whole_number("images", self.data.images, low=1)

    def seeds_of(self, pool: str) -> tuple[int, ...]:
        """Seeds of the streams that a pool answers."""
        return (self.seeds[self.pools.index(pool)],) if self.paired_seeds else self.seeds

    def to_json(self) -> dict[str, Any]:
        described = asdict(self)
        described["variants"] = [str(variant) for variant in self.variants]
        described["data"]["options"] = dict(self.data.options)
        sizes = described.pop("batch_sizes")
        return {**described, "batch_size": sizes[0] if len(sizes) == 1 else list(sizes)}


@dataclass(frozen=True)
class Target:
    """One domain, or several that are streamed together."""

    domains: tuple[str, ...]
    streams: tuple[str, ...]

    @property
    def name(self) -> str:
        return "+".join(self.domains)


def targets_of(plan: BenchPlan, dataset: Dataset) -> tuple[Target, ...]:
    """The targets by name: 'all' is each domain, 'pairs' every two of them together, 'a+b' these two."""
    domains = dataset.outside if plan.protocol == "ood" else dataset.domains
    if not domains:
        kind = "outside test sets" if plan.protocol == "ood" else "domains to leave out"
        raise InputError(
            f"'{dataset.name}' has no {kind} under this root, so --protocol {plan.protocol} has no targets."
        )
    named = [target for spec in plan.targets for target in _expand(spec, domains)]
    for target in named:
        for domain in target:
            if domain not in domains:
                raise unknown_name(f"target in '{dataset.name}' ({plan.protocol})", domain, domains)
        if len(set(target)) != len(target):
            raise InputError(f"The target {'+'.join(target)} names a domain twice.")
    if not named:
        raise InputError(f"No target is named. Write --targets all, or one or more of {', '.join(domains)}.")
    # 'a+b' and 'b+a' are one target.
    named = [tuple(domain for domain in domains if domain in target) for target in named]
    mixtures = tuple(spec for spec in plan.streams if spec.partition(":")[0] == "mixture")
    if mixtures and all(len(target) == 1 for target in named):
        raise InputError(
            f"The stream {mixtures[0]} mixes several target domains: name them together, as in "
            f"--targets {'+'.join(domains[:2])}, or take every two with --targets pairs."
        )
    # A mixture needs several domains; every other stream takes any target.
    plain = tuple(spec for spec in plan.streams if spec not in mixtures)
    targets = (Target(target, plan.streams if len(target) > 1 else plain) for target in dict.fromkeys(named))
    return tuple(target for target in targets if target.streams)


def _expand(spec: str, domains: Sequence[str]) -> list[tuple[str, ...]]:
    if spec in domains:
        return [(spec,)]
    if spec == "all":
        return [(domain,) for domain in domains]
    if spec == "pairs":
        return list(combinations(domains, 2))
    return [tuple(spec.split("+"))]


def _require_distinct(what: str, values: Sequence[Any]) -> None:
    if not values:
        raise InputError(f"A benchmark needs at least one {what}.")
    if len(set(values)) != len(values):
        raise InputError(f"A {what} is named twice: {list(values)}.")
