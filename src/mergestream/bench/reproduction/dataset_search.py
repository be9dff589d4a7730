"""Finds the paper's data sets under one folder, and says how to get those that are not there."""

from dataclasses import dataclass
from pathlib import Path

from mergestream.bench.reproduction.paper_values import DATASETS
from mergestream.data.datasets import file_source_of
from mergestream.data.datasets.image_trees import plain_name
from mergestream.runtime.errors import InputError, MergestreamError, some
from mergestream.runtime.files import atomic_folder

# What a folder or zip of each set may be called, however it is spelt.
FOLDERS = {
    "midog": ("midog", "midog25", "midog2025", "midog_2025", "midog25_atypical"),
    "organs": ("organs", "medimeta", "medimetaorgans", "medimeta_organs"),
    "histopantum": ("histopantum", "histopantume", "histo"),
    "isic": ("isic", "isic2019", "isic_2019"),
    "messidor": ("messidor",),
    "pacs": ("pacs", "kfold"),
    "vlcs": ("vlcs",),
    "office_home": ("office_home", "officehome", "officehomedataset_10072016"),
    "terra": ("terra", "terra_incognita", "terraincognita", "caltech_camera_traps"),
}


@dataclass(frozen=True)
class DatasetPlace:
    """Where a data set of the paper is; without a root, why it cannot be used."""

    name: str
    root: str | None
    domains: tuple[str, ...] = ()
    images: int = 0
    problem: str = ""

    @property
    def title(self) -> str:
        return DATASETS[self.name]


def find_datasets(folder: Path, names: tuple[str, ...]) -> list[DatasetPlace]:
    """Look for each set among the folders and zips in `folder`, and read its index."""
    if not folder.is_dir():
        raise InputError(
            f"--data {folder} is no folder. It holds one folder or zip per data set: {some(list(FOLDERS))}."
        )
    entries = sorted(path for path in folder.iterdir() if path.is_dir() or path.suffix.lower() == ".zip")
    by_name = {plain_name(path.stem if path.is_file() else path.name): path for path in reversed(entries)}
    return [_place(name, [by_name[each] for each in FOLDERS[name] if each in by_name]) for name in names]


def _place(name: str, roots: list[Path]) -> DatasetPlace:
    source = file_source_of(name)
    if not roots:
        looked_for = " or ".join(FOLDERS[name][:2])
        how = f"Get it from {source.card.source}. It should hold {source.card.layout}."
        return DatasetPlace(name, None, problem=f"no folder or zip called {looked_for}. {how}")
    try:
        _, index = source.index(roots[0])
        index.require_usable(allow_missing_classes=False)
    except MergestreamError as error:
        return DatasetPlace(name, None, problem=f"{roots[0].name} cannot be used: {error}")
    return DatasetPlace(name, str(roots[0].resolve()), tuple(index.card.domains), len(index.samples))


def write_standins(folder: Path, names: tuple[str, ...]) -> None:
    """Write invented pictures in every set's published layout; what is there already stays."""
    for name in names:
        if not (folder / name).is_dir():
            with atomic_folder(folder / name, lambda _: False) as scratch:
                file_source_of(name).write_standin(scratch)


def describe_places(places: list[DatasetPlace], *, whole_paths: bool = True) -> list[str]:
    """One line per data set."""
    return [
        f"{each.title}: {each.images:,} images of {len(each.domains)} domains in "
        f"{each.root if whole_paths else Path(each.root).name}"
        if each.root
        else f"{each.title}: left out, {each.problem}"
        for each in places
    ]
