"""All data sets, in one literal table."""

from collections.abc import Callable
from typing import Any

from mergestream.datasets import phantom
from mergestream.datasets.base import Dataset, DomainData, concatenate
from mergestream.errors import unknown_name

__all__ = ["DATASETS", "Dataset", "DomainData", "concatenate", "list_datasets", "load_dataset"]

DATASETS: dict[str, Callable[..., Dataset]] = {"phantom": phantom.load}


def list_datasets() -> list[str]:
    return list(DATASETS)


def load_dataset(name: str, root: str | None = None, **options: Any) -> Dataset:
    """A data set by name; `root` is its folder or zip where it has one."""
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    return DATASETS[name](root, **options)
