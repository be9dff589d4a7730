"""All data sets in one table, those of other packages included, and requests that open them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mergestream.data.datasets import isic, mammo, messidor, midog, organs, own_data, phantom, terra
from mergestream.data.datasets.dataset_sources import DatasetSource, FileSource, GeneratedSource, require_options
from mergestream.data.datasets.domain_data import Dataset, DomainData, concatenate
from mergestream.data.datasets.image_trees import HISTOPANTUM, OFFICE_HOME, PACS, VLCS, case_of, read_tree
from mergestream.data.datasets.index import DatasetCard, Index, Sample
from mergestream.data.datasets.standins import drawing
from mergestream.data.datasets.standins.fake_isic import write_isic
from mergestream.data.datasets.standins.fake_mammo import write_mammo
from mergestream.data.datasets.standins.fake_organs import write_organ_mnist, write_organs
from mergestream.data.datasets.standins.fake_tables import write_messidor, write_midog, write_terra
from mergestream.networks.preprocessing import Preprocessing
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.open_table import OpenTable
from mergestream.runtime.option_checks import parse_options

__all__ = [
    "DATASETS",
    "DataRequest",
    "Dataset",
    "DatasetCard",
    "DomainData",
    "FileSource",
    "GeneratedSource",
    "Index",
    "Sample",
    "concatenate",
    "file_source_of",
    "list_datasets",
    "load_dataset",
    "open_data",
    "source_of",
]

OWN: dict[str, DatasetSource] = {
    "pacs": FileSource(PACS, lambda root: read_tree(root, PACS), drawing.write_pacs),
    "vlcs": FileSource(VLCS, lambda root: read_tree(root, VLCS), drawing.write_vlcs),
    "office_home": FileSource(OFFICE_HOME, lambda root: read_tree(root, OFFICE_HOME), drawing.write_office_home),
    "terra": FileSource(terra.CARD, terra.read, write_terra),
    "midog": FileSource(midog.CARD, midog.read, write_midog),
    "organs": FileSource(organs.ORGANS, organs.read_organs, write_organs),
    "organ_mnist": FileSource(organs.ORGAN_MNIST, organs.read_organ_mnist, write_organ_mnist),
    "histopantum": FileSource(
        HISTOPANTUM, lambda root: read_tree(root, HISTOPANTUM, case_of), drawing.write_histopantum
    ),
    "isic": FileSource(isic.CARD, isic.read, write_isic, default_part="train+val"),
    "messidor": FileSource(messidor.CARD, messidor.read, write_messidor),
    "mammo": FileSource(mammo.CARD, mammo.read, write_mammo),
    "folder": FileSource(own_data.FOLDER, own_data.read_folder, drawing.write_folder),
    "table": FileSource(own_data.TABLE, own_data.read_table, drawing.write_table),
    "phantom": GeneratedSource(phantom.CARD, phantom.load),
}


def _usable(name: str, source: Any) -> DatasetSource:
    """A source that can be opened by this name; others are refused with a sentence."""
    if not isinstance(source, FileSource | GeneratedSource) or source.card.name != name:
        raise InputError(
            f"{source!r} is no source of a data set '{name}': a FileSource or GeneratedSource with its card."
        )
    return source


def _maker(source: DatasetSource) -> Callable[..., Any]:
    return source.read if isinstance(source, FileSource) else source.generate


DATASETS: OpenTable[DatasetSource] = OpenTable("data set", "mergestream.datasets", OWN, _usable, _maker)


def register_dataset(about: DatasetSource | DatasetCard) -> Any:
    """Add a data set of your own, so that it can be named wherever ours can.

    As a call with its source, or with its card as a decorator of a function: `read(root, ...)` gives the Index of files
    under a root; one whose first parameter is not `root` generates the Dataset.
    """
    if not isinstance(about, DatasetCard):
        return DATASETS.register(getattr(getattr(about, "card", None), "name", ""), about)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        kind = FileSource if next(iter(inspect.signature(function).parameters), "") == "root" else GeneratedSource
        DATASETS.register(about.name, kind(about, function))
        return function

    return register


def list_datasets() -> list[str]:
    return list(DATASETS)


def load_dataset(name: str, root: str | None = None, **options: Any) -> Dataset:
    """Open a data set by name; `root` is its folder or zip, if it has one. Options: docs/datasets.md."""
    return source_of(name).load(root, **options)


def source_of(name: str) -> DatasetSource:
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    return DATASETS[name]


def file_source_of(name: str) -> FileSource:
    """The source of a data set on disk, so not of 'phantom'."""
    source = source_of(name)
    if not isinstance(source, FileSource):
        raise InputError(f"'{name}' is generated: there is nothing on disk to verify or to fake.")
    return source


@dataclass(frozen=True)
class DataRequest:
    """Which data to open and how: all that a worker process needs."""

    name: str
    root: str | None
    options: tuple[tuple[str, Any], ...] = ()
    images: int | None = None  # at most this many per target, a fixed random choice
    skip_bad: int = 0
    allow_missing_classes: bool = False
    classes: tuple[str, ...] | None = None  # for a site's own data, which may lack some of them

    @classmethod
    def parse(
        cls, name: str, root: Path | None, options: Sequence[str] | Mapping[str, Any] | None = None, **more: Any
    ) -> "DataRequest":
        """A request from texts of the command line, for a process with any working folder."""
        return cls(name, None if root is None else str(root.resolve()), parse_options(options or ()), **more)

    def of_pool(self, classes: tuple[str, ...]) -> "DataRequest":
        """The request for a pool's classes, of which a site's own data may lack some."""
        return replace(self, classes=classes)


# A worker runs many jobs on the same data.
@lru_cache(maxsize=2)
def open_data(
    request: DataRequest, preprocessing: Preprocessing, work: Path, on_image: Callable[[], None] = lambda: None
) -> Dataset:
    """Open data at the network's input size; the decoded arrays are cached under `work`."""
    source = source_of(request.name)
    options = dict(request.options)
    require_options(request.name, options, source.options())
    if request.classes is not None and "classes" in source.options():
        options.setdefault("classes", request.classes)
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
