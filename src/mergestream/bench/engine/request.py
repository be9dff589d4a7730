"""What a person asked for, in words -> a plan."""

from collections.abc import Sequence
from pathlib import Path

from mergestream.bench.engine.plan import BenchPlan
from mergestream.bench.engine.presets import PRESETS, Preset
from mergestream.bench.engine.variants import parse_variants
from mergestream.data.datasets.opening import DataRequest
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.option_text import parse_options

METHODS, STREAMS, SEEDS, BATCH_SIZE = "all", "iid", "0", 32


def plan_from(
    *,
    dataset: str,
    root: Path | None,
    pools: Sequence[str],
    methods: str | None = None,
    streams: str | None = None,
    targets: str = "all",
    seeds: str | None = None,
    batch_size: int | None = None,
    protocol: str = "lodo",
    preset: str | None = None,
    data_options: Sequence[str] = (),
    images: int | None = None,
    reference: str | None = None,
    skip_bad: int = 0,
    allow_missing_classes: bool = False,
    allow_seen: bool = False,
    device: str = "auto",
) -> BenchPlan:
    """A plan from the command line's words. A preset fills what is not given; what is given stands above it."""
    given = _preset(preset)
    asked = METHODS if methods is None and given is None else methods
    options = parse_options(data_options)
    where = None if root is None else str(root.resolve())
    return BenchPlan(
        data=DataRequest(dataset, where, options, images, skip_bad, allow_missing_classes),
        pools=tuple(str(Path(pool).resolve()) for pool in pools),
        variants=parse_variants(asked) if asked is not None else given.variants,  # type: ignore[union-attr]
        targets=_listed(targets),
        streams=_listed(streams) if streams else given.streams if given else (STREAMS,),
        seeds=_seeds(seeds) if seeds else given.seeds if given else _seeds(SEEDS),
        batch_size=batch_size if batch_size is not None else given.batch_size if given else BATCH_SIZE,
        protocol=protocol,
        allow_seen=allow_seen,
        reference=reference,
        # 'all' and presets mean all that this pool allows; what a person names must run.
        skip_impossible=asked is None or "all" in _listed(asked),
        device=device,
        preset=preset,
    )


def _preset(name: str | None) -> Preset | None:
    if name is None:
        return None
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name]


def _listed(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in _listed(text))
    except ValueError:
        raise InputError(f"Seeds are whole numbers separated by commas, got '{text}'.") from None
