"""Data sets opened at a network's input size, for training and benchmarks."""

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
    """Which data to open and how: all that a worker process needs."""

    name: str
    root: str | None
    options: tuple[tuple[str, Any], ...] = ()
    images: int | None = None  # at most this many per target, a fixed random choice
    skip_bad: int = 0
    allow_missing_classes: bool = False


# A worker runs many jobs on the same data.
@lru_cache(maxsize=2)
def open_data(
    request: DataRequest, preprocessing: Preprocessing, work: Path, on_image: Callable[[], None] = lambda: None
) -> Dataset:
    """Open data at the network's input size; the decoded arrays are cached under `work`."""
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
