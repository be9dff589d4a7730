"""A plan from the words of a command line."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mergestream.bench.engine.named_plans import PLANS, NamedPlan
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
    plan: str | None = None,
    methods: str | None = None,
    streams: str | None = None,
    targets: str = "all",
    seeds: str | None = None,
    batch_sizes: str | None = None,
    loud_heads: str = "1",
    data_options: Sequence[str] = (),
    images: int | None = None,
    skip_bad: int = 0,
    allow_missing_classes: bool = False,
    **fields: Any,
) -> BenchPlan:
    """Options that are given replace those of the named plan; `fields` are fields of a BenchPlan."""
    if plan is not None and plan not in PLANS:
        raise unknown_name("plan", plan, PLANS)
    named = PLANS[plan] if plan is not None else NamedPlan("", parse_variants("all"), ("iid",), seeds=(0,))
    folder = None if root is None else str(root.resolve())
    return BenchPlan(
        data=DataRequest(dataset, folder, parse_options(data_options), images, skip_bad, allow_missing_classes),
        pools=tuple(str(Path(pool).resolve()) for pool in pools),
        variants=named.variants if methods is None else parse_variants(methods),
        targets=_items(targets),
        streams=_items(streams) if streams else named.streams,
        seeds=_numbers("Seeds", seeds, int) if seeds else named.seeds,
        batch_sizes=_numbers("Batch sizes", batch_sizes, int) if batch_sizes else named.batch_sizes,
        loud_heads=_numbers("Factors of a head", loud_heads, float),
        # 'all' and named plans mean all that this pool allows; a method that a person names must run.
        skip_impossible=methods is None or "all" in _items(methods),
        preset=plan,
        **fields,
    )


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _numbers(what: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    try:
        return tuple(kind(item) for item in _items(text))
    except ValueError:
        whole = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{what} are {whole} separated by commas, got '{text}'.") from None
