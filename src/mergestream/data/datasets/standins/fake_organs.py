"""Stand-ins of organs: folders in the MedIMeta format, and MedMNIST's .npz files, smaller than their names say."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]

from mergestream.data.datasets import organs
from mergestream.data.datasets.medimeta import PARTS
from mergestream.data.datasets.standins.drawing import Content, grey, write_files
from mergestream.data.datasets.table_files import needed_library

SCANS = ("volume-0", "volume-1", "volume-28", "test-volume-0", "test-volume-1")
PART_OF_SCAN = dict(zip(SCANS, ("train", "train", "val", "test", "test"), strict=True))


@dataclass(frozen=True)
class FakeImage:
    """One image to write: its pixels [H,W] or [H,W,3], its label and part, and what annotations.csv says of it."""

    pixels: np.ndarray
    label: int
    part: str
    annotations: dict[str, str] = field(default_factory=dict)


def write_medimeta(folder: Path, task: str, names: Sequence[str], rows: Sequence[FakeImage]) -> None:
    """A whole MedIMeta folder; its name is the data set's id. Split files have no line end after the last line."""
    images = {f"images/{number:06d}.tiff": row for number, row in enumerate(rows)}
    files: dict[str, Content] = {path: row.pixels for path, row in images.items()}
    files["LICENSE"] = ["A stand-in, drawn by mergestream."]
    for kind, parts in (("splits", {p: p for p in PARTS}), ("original_splits", {"train": "train", "val": "train"})):
        for part in sorted({parts.get(row.part, "test") for row in rows}):
            inside = [path for path, row in images.items() if parts.get(row.part, "test") == part]
            files[f"{kind}/{part}.txt"] = "\n".join(inside).encode()
    lines = [["filepath", f"tasks/{task}", *rows[0].annotations, "split"]]
    lines += [[path, str(row.label), *row.annotations.values(), row.part] for path, row in images.items()]
    files["annotations.csv"] = [",".join(line) for line in lines]
    files["info.yaml"] = yaml.safe_dump(_info(folder.name, task, names, rows), sort_keys=False).encode()
    write_files(folder, files)
    with needed_library("h5py", "Writing .hdf5").File(folder / "images.hdf5", "w") as file:
        file.create_dataset("images", data=np.stack([row.pixels for row in rows]))
    (folder / "task_labels").mkdir()
    np.save(folder / "task_labels" / f"{task}.npy", np.array([row.label for row in rows]))


def write_organs(folder: Path) -> None:
    for plane in organs.PLANES:
        rows = []
        for number, scan in enumerate(SCANS):
            place = "LITS-Challenge-Test-Data" if scan.startswith("test") else "LITS Challenge/Training Batch 1"
            for label, name in enumerate(organs.ORGANS.classes):
                annotations = {"original_filepath": f"{place}/{scan}.nii", "organ_name": name}
                rows.append(FakeImage(grey(plane, label, number), label, PART_OF_SCAN[scan], annotations))
        write_medimeta(folder / f"organs_{plane}", organs.TASK, organs.ORGANS.classes, rows)


def _info(id_: str, task: str, names: Sequence[str], rows: Sequence[FakeImage]) -> dict[str, Any]:
    height, width = rows[0].pixels.shape[:2]
    target = "BINARY_CLASSIFICATION" if len(names) == 2 else "MULTICLASS_CLASSIFICATION"
    return {
        "id": id_,
        "name": f"Stand-in of {id_}",
        "domain": "Stand-in",
        "tasks": [{"task_name": task, "task_target": target, "labels": dict(enumerate(names))}],
        "input_size": [1 if rows[0].pixels.ndim == 2 else 3, height, width],
        "splits_num_samples": {part: sum(row.part == part for row in rows) for part in PARTS},
        "subject_overlaps": [],
    }


MNIST_IMAGES = {"train": 2, "val": 1, "test": 2}  # images per class


def write_organ_mnist(folder: Path, resolution: int = 224, pixels: int = 24) -> None:
    """Labels uint8 [N,1], as published; classes in no order."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain, stem in organs.STEMS.items():
        arrays: dict[str, Any] = {}
        for first, (part, each) in zip((0, 10, 20), MNIST_IMAGES.items(), strict=True):
            order = [(label, first + n) for n in range(each) for label in range(len(organs.ORGAN_MNIST.classes))][::-1]
            images = [grey(domain, label, number, pixels) for label, number in order]
            arrays[f"{part}_images"] = np.stack(images)
            arrays[f"{part}_labels"] = np.array([[label] for label, _ in order], dtype=np.uint8)
        np.savez_compressed(folder / f"{stem}{organs.SUFFIXES[resolution]}.npz", **arrays)
