"""Data asked for by name, opened at a network's own size: what training and benchmarks share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mergestream.data.datasets import Dataset, source_of
from mergestream.data.datasets.dataset_sources import FileSource, require_options
from mergestream.networks.preprocessing import Preprocessing


@dataclass(frozen=True)
class DataRequest:
    """Which data, and how they are read: all a worker needs to open them again."""

    name: str
    root: str | None
    options: tuple[tuple[str, Any], ...] = ()
    images: int | None = None  # at most so many of each target, a fixed random choice
    skip_bad: int = 0
    allow_missing_classes: bool = False


def _nothing() -> None:
    pass


# A worker gets many jobs on the same data.
@lru_cache(maxsize=2)
def open_data(
    request: DataRequest, preprocessing: Preprocessing, work: Path, on_image: Callable[[], None] = _nothing
) -> Dataset:
    """The data as the network takes them, decoded once for all that is done under `work`."""
    source = source_of(request.name)
    options = dict(request.options)
    require_options(request.name, options, source.options())
    if isinstance(source, FileSource):
        options |= {
            "size": preprocessing.size,
            "interpolation": preprocessing.interpolation,
            "cache_folder": work / "cache" / "images",
            "skip_bad": request.skip_bad,
            "allow_missing_classes": request.allow_missing_classes,
            "on_image": on_image,
        }
    return source.load(request.root, **options)
