"""A plan from the words of a command line."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from mergestream.bench.engine.named_plans import PLANS
from mergestream.bench.engine.plan import BenchPlan
from mergestream.bench.engine.variants import parse_variants
from mergestream.data.datasets.data_request import DataRequest
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.option_text import parse_options

Number = TypeVar("Number", int, float)


def plan_from(
    *,
    dataset: str,
    root: Path | None,
    pools: Sequence[str],
    methods: str | None = None,
    streams: str | None = None,
    targets: str = "all",
    seeds: str | None = None,
    batch_sizes: str | None = None,
    protocol: str = "lodo",
    plan: str | None = None,
    data_options: Sequence[str] = (),
    images: int | None = None,
    reference: str | None = None,
    skip_bad: int = 0,
    allow_missing_classes: bool = False,
    allow_seen: bool = False,
    loud_heads: str = "1",
    device: str = "auto",
    dtype: str = "float32",
    timed: bool = False,
) -> BenchPlan:
    """Options that are given replace those of the named plan."""
    if plan is not None and plan not in PLANS:
        raise unknown_name("plan", plan, PLANS)
    named = None if plan is None else PLANS[plan]
    asked = "all" if methods is None and named is None else methods
    variants = named.variants if asked is None and named is not None else parse_variants(asked or "")
    options = parse_options(data_options)
    folder = None if root is None else str(root.resolve())
    return BenchPlan(
        data=DataRequest(dataset, folder, options, images, skip_bad, allow_missing_classes),
        pools=tuple(str(Path(pool).resolve()) for pool in pools),
        variants=variants,
        targets=_items(targets),
        streams=_items(streams) if streams else named.streams if named else ("iid",),
        seeds=_numbers("Seeds", seeds, int) if seeds else named.seeds if named else (0,),
        batch_sizes=_numbers("Batch sizes", batch_sizes, int) if batch_sizes else named.batch_sizes if named else (32,),
        loud_heads=_numbers("Factors of a head", loud_heads, float),
        protocol=protocol,
        allow_seen=allow_seen,
        reference=reference,
        # 'all' and named plans mean all that this pool allows; a method that a person names must run.
        skip_impossible=asked is None or "all" in _items(asked),
        device=device,
        dtype=dtype,
        preset=plan,
        timed=timed,
    )


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _numbers(what: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    try:
        return tuple(kind(item) for item in _items(text))
    except ValueError:
        whole = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{what} are {whole} separated by commas, got '{text}'.") from None
