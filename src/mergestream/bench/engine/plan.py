"""What a benchmark runs, as data: methods with options, targets, streams and seeds, parsed from texts or named."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from mergestream.data.datasets import DataRequest, Dataset
from mergestream.data.streams import parse_stream
from mergestream.methods.spelling import Variant, parse_variants
from mergestream.runtime.errors import InputError, some, unknown_name
from mergestream.runtime.option_checks import one_of, whole_number

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
        one_of("protocol", self.protocol, PROTOCOLS)
        one_of("device", self.device, DEVICES)
        one_of("dtype", self.dtype, DTYPES)
        for spec in self.streams:
            parse_stream(spec)
        for size in self.batch_sizes:
            whole_number("batch_size", size, low=1)
        pools = [str(Path(pool).resolve()) for pool in self.pools]
        lists: dict[str, Sequence[Any]] = {"pool": pools, "stream": self.streams, "batch size": self.batch_sizes}
        lists |= {"factor of a head": self.loud_heads} | ({} if self.paired_seeds else {"seed": self.seeds})
        for what, values in lists.items():
            if not values:
                raise InputError(f"A benchmark needs at least one {what}.")
            if len(set(values)) != len(values):
                raise InputError(f"A {what} is named twice: {list(values)}.")
        if self.paired_seeds and len(self.seeds) != len(self.pools):
            raise InputError(f"Paired seeds need one seed per pool: {len(self.pools)} pools, {len(self.seeds)} seeds.")
        methods = {name for variant in self.variants for name in (variant.method, str(variant))}
        if self.reference is not None and self.reference not in methods:
            raise unknown_name("method to compare with", self.reference, methods)
        whole_number("skip_bad", self.data.skip_bad, low=0)
        if self.data.images is not None:
            whole_number("images", self.data.images, low=1)

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
        raise InputError(f"No target is named. Write --targets all, or one or more of {some(list(domains))}.")
    # 'a+b' and 'b+a' are one target.
    named = [tuple(domain for domain in domains if domain in target) for target in named]
    mixtures = tuple(spec for spec in plan.streams if parse_stream(spec, dataset.classes).needs_domains)
    if mixtures and all(len(target) == 1 for target in named):
        raise InputError(
            f"The stream {mixtures[0]} needs several target domains: name them together, as in "
            f"--targets {'+'.join(domains[:2])}, or take every two with --targets pairs."
        )
    # Some streams need several domains; every other one takes any target.
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


TABLES: dict[str, Any] = tomllib.loads(Path(__file__).parents[1].joinpath("plans.toml").read_text(encoding="utf-8"))
PLANS: dict[str, dict[str, str]] = TABLES["paper"]
UNNAMED = {"methods": "all", "streams": "iid", "seeds": "0"}
Number = TypeVar("Number", int, float)


def plan_from(
    *,
    data: DataRequest,
    pools: Sequence[str],
    plan: str | None = None,
    methods: str | None = None,
    streams: str | None = None,
    targets: str = "all",
    seeds: str | None = None,
    batch_sizes: str | None = None,
    loud_heads: str = "1",
    **fields: Any,
) -> BenchPlan:
    """Options that are given replace those of the named plan; `fields` are fields of a BenchPlan."""
    if plan is not None and plan not in PLANS:
        raise unknown_name("plan", plan, PLANS)
    named = PLANS[plan] if plan is not None else UNNAMED
    return BenchPlan(
        data=data,
        pools=tuple(str(Path(pool).resolve()) for pool in pools),
        variants=parse_variants(named["methods"] if methods is None else methods),
        targets=_items(targets),
        streams=_items(streams or named["streams"]),
        seeds=numbers("Seeds", seeds or named["seeds"], int),
        batch_sizes=numbers("Batch sizes", batch_sizes or "32", int),
        loud_heads=numbers("Factors of a head", loud_heads, float),
        # 'all' means all that this pool allows; a method that a person or a plan names must run.
        skip_impossible="all" in _items(named["methods"] if methods is None else methods),
        preset=plan,
        **fields,
    )


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def numbers(what: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Parse numbers separated by commas."""
    try:
        return tuple(kind(item) for item in _items(text))
    except ValueError:
        whole = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{what} are {whole} separated by commas, got '{text}'.") from None
