"""MedIMeta (Woerner et al. 2024): one folder per data set, in one common format."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from mergestream.data.datasets.index import Sample
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.table_files import array_shape, decode_text, read_csv, read_labels
from mergestream.runtime.errors import DataError, unknown_name

PARTS = ("train", "val", "test")
SUBJECT = re.compile(r"(patient|subject|case|scan|volume)([ _-]?(id|number|name))?", re.IGNORECASE)


class MedimetaImage(NamedTuple):
    """One image of a MedIMeta folder: a sample without domain and group, and its row of annotations.csv, or nothing.

    The sample's id is folder and number, as in organs_axial/000123; `label_name` is its label in info.yaml.
    """

    sample: Sample
    label_name: str
    annotations: Mapping[str, str]

    @property
    def subject(self) -> str | None:
        """The patient or scan, if annotations.csv has a column that names one."""
        return next((value for name, value in self.annotations.items() if SUBJECT.fullmatch(name) and value), None)


def find_medimeta(root: Root, folder_name: str) -> str | None:
    """Find a MedIMeta folder under a root by its name, else by the id in its info.yaml."""
    homes = [PurePosixPath(path).parent for path in root.named("info.yaml")]
    matches = [home for home in homes if home.name.lower() == folder_name.lower()]
    matches = matches or [home for home in homes if _info(root, str(home)).get("id") == folder_name]
    if len(matches) > 1:
        raise DataError(f"{root.location} holds {folder_name} twice: {matches[0]} and {matches[1]}. Keep one of them.")
    return str(matches[0]) if matches else None


def read_medimeta(
    root: Root, folder_name: str, *tasks: str, classes: tuple[str, ...] | None = None
) -> list[MedimetaImage]:
    """Read the images of one MedIMeta folder, by number, with their labels for the first task that it has.

    Images are images/000123.tiff or, without such a folder, rows of images.hdf5. The label of image 123 is the
    123rd of task_labels/<task>.npy, and splits/{train,val,test}.txt say which part it belongs to.
    """
    home = find_medimeta(root, folder_name)
    if home is None:
        raise DataError(
            f"{root.location} should hold the MedIMeta folder {folder_name} with its info.yaml; "
            f"it holds {root.glance()}."
        )
    task, names = _label_names(root, home, tasks)
    if classes is not None and names != classes:
        raise DataError(f"{folder_name} in {root.location} has other labels than published: {names}.")
    labels = read_labels(root, _inside(home, "task_labels", f"{task}.npy"), "labels", len(names))
    places = _places(root, home, len(labels))
    parts, table = _parts(root, home, len(labels)), _inside(home, "annotations.csv")
    rows = read_csv(root, table, ("filepath",)) if table in root.files else []
    annotations = {_number(root, row["filepath"], table): row for row in rows}
    images = []
    for n, label in enumerate(labels):
        file, array, row = places[n]
        sample = Sample(f"{folder_name}/{n:06d}", file, "", label, part=parts.get(n), array=array, row=row)
        images.append(MedimetaImage(sample, names[label], annotations.get(n, {})))
    return images


def _inside(home: str, *parts: str) -> str:
    return PurePosixPath(home, *parts).as_posix()


def _info(root: Root, home: str) -> dict[str, Any]:
    path = _inside(home, "info.yaml")
    try:
        info = yaml.safe_load(decode_text(root.read(path)))
    except yaml.YAMLError as error:
        raise DataError(f"{path} in {root.location} is not YAML: {error}.") from error
    return info if isinstance(info, dict) else {}


def _label_names(root: Root, home: str, tasks: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The first of the tasks that is there, and its labels' names in the order of their numbers: 0, 1, 2 and so on."""
    listed = [each for each in _info(root, home).get("tasks") or [] if isinstance(each, dict)]
    labels = {str(each.get("task_name")): each.get("labels") for each in listed}
    task = next((task for task in tasks if task in labels), None)
    if task is None:
        raise unknown_name(f"task in {_inside(home, 'info.yaml')}", tasks[-1], labels)
    names = labels[task]
    if not isinstance(names, dict) or sorted(names) != list(range(len(names))):
        raise DataError(f"{_inside(home, 'info.yaml')} in {root.location} does not number the labels of '{task}'.")
    return task, tuple(str(names[number]) for number in range(len(names)))


def _places(root: Root, home: str, count: int) -> list[tuple[str, str | None, int]]:
    """File, array and row of every image; there must be as many as labels."""
    folder = _inside(home, "images")
    files = {_number(root, path): path for path in root.images if str(PurePosixPath(path).parent) == folder}
    packed = _inside(home, "images.hdf5")
    if files:
        there, numbers = f"{len(files)} images in {folder}", sorted(files)
    elif packed in root.files:
        rows = array_shape(root, packed, "images")[0]
        there, numbers = f"{rows} rows in {packed}", list(range(rows))
    else:
        raise DataError(f"{root.location} has neither {folder}/ nor {packed}. Unpack the images there.")
    if numbers != list(range(count)):
        absent = sorted(set(range(count)) - set(numbers))
        first = f"; the first that is missing is {absent[0]:06d}" if absent else ""
        raise DataError(f"{root.location} has {count} labels but {there}{first}. Fetch {home} again.")
    return [(files[n], None, 0) if files else (packed, "images", n) for n in numbers]


def _parts(root: Root, home: str, count: int) -> dict[int, str]:
    """The part of each image that the split files name."""
    parts: dict[int, str] = {}
    for part in PARTS:
        path = _inside(home, "splits", f"{part}.txt")
        for line in decode_text(root.read(path)).split("\n") if path in root.files else ():
            if not line.strip():
                continue
            number = _number(root, line.strip(), path)
            if number >= count:
                raise DataError(f"{path} in {root.location} names {line.strip()}, but there are {count} images.")
            if parts.setdefault(number, part) != part:
                raise DataError(f"{line.strip()} in {root.location} is in two splits: {parts[number]} and {part}.")
    return parts


def _number(root: Root, image: str, named_in: str = "images") -> int:
    """123 of images/000123.tiff."""
    stem = PurePosixPath(image.replace("\\", "/")).stem
    if not stem.isdecimal():
        raise DataError(f"{image} ({named_in} in {root.location}) is no MedIMeta image: 000123.tiff was expected.")
    return int(stem)
