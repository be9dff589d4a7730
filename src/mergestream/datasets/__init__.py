"""All data sets, in one literal table."""

from typing import Any

from mergestream.datasets import folder, office_home, pacs, phantom, table, vlcs
from mergestream.datasets.about import About
from mergestream.datasets.base import Dataset, DomainData, concatenate
from mergestream.datasets.sources import FileSource, GeneratedSource, Source
from mergestream.datasets.standins import own, trees
from mergestream.errors import unknown_name

__all__ = ["DATASETS", "About", "Dataset", "DomainData", "concatenate", "list_datasets", "load_dataset", "source_of"]

DATASETS: dict[str, Source] = {
    "pacs": FileSource(pacs.ABOUT, pacs.read, trees.write_pacs),
    "vlcs": FileSource(vlcs.ABOUT, vlcs.read, trees.write_vlcs),
    "office_home": FileSource(office_home.ABOUT, office_home.read, trees.write_office_home),
    "folder": FileSource(folder.ABOUT, folder.read, own.write_folder),
    "table": FileSource(table.ABOUT, table.read, own.write_table),
    "phantom": GeneratedSource(phantom.ABOUT, phantom.load),
}


def list_datasets() -> list[str]:
    return list(DATASETS)


def load_dataset(name: str, root: str | None = None, **options: Any) -> Dataset:
    """A data set by name; `root` is its folder or zip where it has one. Options: docs/datasets.md."""
    return source_of(name).load(root, **options)


def source_of(name: str) -> Source:
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    return DATASETS[name]
