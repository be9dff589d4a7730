"""All data sets, in one literal table."""

from typing import Any

from mergestream.data.datasets import (
    folder,
    histopantum,
    isic,
    mammo,
    messidor,
    midog,
    office_home,
    organ_mnist,
    organs,
    pacs,
    phantom,
    table,
    terra,
    vlcs,
)
from mergestream.data.datasets.about import About
from mergestream.data.datasets.base import Dataset, DomainData, concatenate
from mergestream.data.datasets.sources import FileSource, GeneratedSource, Source
from mergestream.data.datasets.standins import own, trees
from mergestream.data.datasets.standins.isic import write_isic
from mergestream.data.datasets.standins.mammo import write_mammo
from mergestream.data.datasets.standins.medimeta import write_organs
from mergestream.data.datasets.standins.messidor import write_messidor
from mergestream.data.datasets.standins.midog import write_midog
from mergestream.data.datasets.standins.organ_mnist import write_organ_mnist
from mergestream.data.datasets.standins.terra import write_terra
from mergestream.runtime.errors import InputError, unknown_name

__all__ = [
    "DATASETS",
    "About",
    "Dataset",
    "DomainData",
    "concatenate",
    "file_source_of",
    "list_datasets",
    "load_dataset",
    "source_of",
]

DATASETS: dict[str, Source] = {
    "pacs": FileSource(pacs.ABOUT, pacs.read, trees.write_pacs),
    "vlcs": FileSource(vlcs.ABOUT, vlcs.read, trees.write_vlcs),
    "office_home": FileSource(office_home.ABOUT, office_home.read, trees.write_office_home),
    "terra": FileSource(terra.ABOUT, terra.read, write_terra),
    "midog": FileSource(midog.ABOUT, midog.read, write_midog),
    "organs": FileSource(organs.ABOUT, organs.read, write_organs),
    "organ_mnist": FileSource(organ_mnist.ABOUT, organ_mnist.read, write_organ_mnist),
    "histopantum": FileSource(histopantum.ABOUT, histopantum.read, trees.write_histopantum),
    "isic": FileSource(isic.ABOUT, isic.read, write_isic, default_part="train+val"),
    "messidor": FileSource(messidor.ABOUT, messidor.read, write_messidor),
    "mammo": FileSource(mammo.ABOUT, mammo.read, write_mammo),
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


def file_source_of(name: str) -> FileSource:
    """A data set that lies on disk; 'phantom' does not."""
    source = source_of(name)
    if not isinstance(source, FileSource):
        raise InputError(f"'{name}' is generated: there is nothing on disk to verify or to fake.")
    return source
