"""What a benchmark will run, said in full before anything runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from mergestream.bench.engine.variants import Variant
from mergestream.data.datasets import Dataset
from mergestream.data.datasets.opening import DataRequest
from mergestream.data.streams import parse_stream
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.option_checks import whole_number

PROTOCOLS = ("lodo", "ood")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class BenchPlan:
    """Targets × variants × streams × seeds, over one pool or several that differ by their training's seed."""

    data: DataRequest
    pools: tuple[str, ...]
    variants: tuple[Variant, ...]
    targets: tuple[str, ...] = ("all",)
    streams: tuple[str, ...] = ("iid",)
    seeds: tuple[int, ...] = (0,)
    batch_size: int = 32
    protocol: str = "lodo"
    allow_seen: bool = False
    reference: str | None = None  # the method that others are compared with; the first one
    skip_impossible: bool = False  # leave out methods that the pool lacks something for, and say so
    device: str = "auto"
    preset: str | None = None
    every_expert: bool = True  # run each expert alone, too: rows for their average and the oracle

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise unknown_name("protocol", self.protocol, PROTOCOLS)
        if self.device not in DEVICES:
            raise unknown_name("device", self.device, DEVICES)
        for spec in self.streams:
            parse_stream(spec)
        for what, values in (("pool", self.pools), ("stream", self.streams), ("seed", self.seeds)):
            if not values:
                raise InputError(f"A benchmark needs at least one {what}.")
            if len(set(values)) != len(values):
                raise InputError(f"A {what} is named twice: {list(values)}.")
        known = {name for variant in self.variants for name in (variant.method, str(variant))}
        if self.reference is not None and self.reference not in known:
            raise unknown_name("method to compare with", self.reference, known)
        if len({Path(pool).resolve() for pool in self.pools}) != len(self.pools):
            raise InputError(f"Two pools are one folder: {list(self.pools)}.")
        whole_number("batch_size", self.batch_size, low=1)
        whole_number("skip_bad", self.data.skip_bad, low=0)
        if self.data.images is not None:
            whole_number("images", self.data.images, low=1)

    def to_json(self) -> dict[str, Any]:
        told = asdict(self)
        told["variants"] = [str(variant) for variant in self.variants]
        told["data"]["options"] = dict(self.data.options)
        return told


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
    known = dataset.outside if plan.protocol == "ood" else dataset.domains
    if not known:
        kind = "outside test sets" if plan.protocol == "ood" else "domains to leave out"
        raise InputError(
            f"'{dataset.name}' has no {kind} under this root, so --protocol {plan.protocol} has no targets."
        )
    named: list[tuple[str, ...]] = []
    for spec in plan.targets:
        if spec in known:
            named.append((spec,))
        elif spec == "all":
            named += [(domain,) for domain in known]
        elif spec == "pairs":
            named += list(combinations(known, 2))
        else:
            named.append(tuple(spec.split("+")))
    for domains in named:
        for domain in domains:
            if domain not in known:
                raise unknown_name(f"target in '{dataset.name}' ({plan.protocol})", domain, known)
        if len(set(domains)) != len(domains):
            raise InputError(f"The target {'+'.join(domains)} names a domain twice.")
    if not named:
        raise InputError(f"No target is named. Write --targets all, or one or more of {', '.join(known)}.")
    # 'a+b' and 'b+a' are one target.
    named = [tuple(domain for domain in known if domain in domains) for domains in named]
    mixtures = tuple(spec for spec in plan.streams if spec.partition(":")[0] == "mixture")
    if mixtures and all(len(domains) == 1 for domains in named):
        raise InputError(
            f"The stream {mixtures[0]} mixes several target domains: name them together, as in "
            f"--targets {'+'.join(known[:2])}, or take every two with --targets pairs."
        )
    # A mixture needs several domains; every other stream takes any target.
    plain = tuple(spec for spec in plan.streams if spec not in mixtures)
    found = (Target(domains, plan.streams if len(domains) > 1 else plain) for domains in dict.fromkeys(named))
    return tuple(target for target in found if target.streams)
