"""All data sets in one table."""

from typing import Any

from mergestream.data.datasets import isic, mammo, messidor, midog, organs, own_data, phantom, terra
from mergestream.data.datasets.dataset_sources import DatasetSource, FileSource, GeneratedSource
from mergestream.data.datasets.domain_data import Dataset, DomainData, concatenate
from mergestream.data.datasets.image_trees import HISTOPANTUM, OFFICE_HOME, PACS, VLCS, case_of, read_tree
from mergestream.data.datasets.index import DatasetCard
from mergestream.data.datasets.standins import fake_trees
from mergestream.data.datasets.standins.fake_isic import write_isic
from mergestream.data.datasets.standins.fake_mammo import write_mammo
from mergestream.data.datasets.standins.fake_organs import write_organ_mnist, write_organs
from mergestream.data.datasets.standins.fake_tables import write_messidor, write_midog, write_terra
from mergestream.runtime.errors import InputError, unknown_name

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetCard",
    "DomainData",
    "concatenate",
    "file_source_of",
    "list_datasets",
    "load_dataset",
    "source_of",
]

DATASETS: dict[str, DatasetSource] = {
    "pacs": FileSource(PACS, lambda root: read_tree(root, PACS), fake_trees.write_pacs),
    "vlcs": FileSource(VLCS, lambda root: read_tree(root, VLCS), fake_trees.write_vlcs),
    "office_home": FileSource(OFFICE_HOME, lambda root: read_tree(root, OFFICE_HOME), fake_trees.write_office_home),
    "terra": FileSource(terra.CARD, terra.read, write_terra),
    "midog": FileSource(midog.CARD, midog.read, write_midog),
    "organs": FileSource(organs.ORGANS, organs.read_organs, write_organs),
    "organ_mnist": FileSource(organs.ORGAN_MNIST, organs.read_organ_mnist, write_organ_mnist),
    "histopantum": FileSource(
        HISTOPANTUM, lambda root: read_tree(root, HISTOPANTUM, case_of), fake_trees.write_histopantum
    ),
    "isic": FileSource(isic.CARD, isic.read, write_isic, default_part="train+val"),
    "messidor": FileSource(messidor.CARD, messidor.read, write_messidor),
    "mammo": FileSource(mammo.CARD, mammo.read, write_mammo),
    "folder": FileSource(own_data.FOLDER, own_data.read_folder, fake_trees.write_folder),
    "table": FileSource(own_data.TABLE, own_data.read_table, fake_trees.write_table),
    "phantom": GeneratedSource(phantom.CARD, phantom.load),
}


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
