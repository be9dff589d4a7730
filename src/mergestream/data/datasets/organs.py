"""Organs in computed tomography, in three planes: MedIMeta (Woerner et al. 2024) and MedMNIST (Yang et al. 2023)."""

from pathlib import PurePosixPath

import numpy as np

from mergestream.data.datasets.arrays import array_names, array_shape, read_array
from mergestream.data.datasets.index import DatasetCard, Index, Sample
from mergestream.data.datasets.medimeta import LICENCE, PARTS, SOURCE, MedimetaImage, read_medimeta
from mergestream.data.datasets.roots import Root
from mergestream.runtime.errors import DataError, InputError

PLANES = ("axial", "coronal", "sagittal")
TASK = "organ label"

ORGANS = DatasetCard(
    name="organs",
    title="MedIMeta organs: eleven organs in CT slices of three planes",
    layout="organs_axial, organs_coronal and organs_sagittal, each with images/ (or images.hdf5), info.yaml, splits/ "
    "and task_labels/organ label.npy",
    licence=LICENCE,
    source=SOURCE,
    domains=PLANES,
    classes=(
        "heart",
        "left lung",
        "right lung",
        "liver",
        "spleen",
        "pancreas",
        "left kidney",
        "right kidney",
        "bladder",
        "left femoral head",
        "right femoral head",
    ),
    counts=dict.fromkeys(PLANES, 1645),
    views=("brightness",),  # left and right are classes: a flip would make a label false
    group="CT scan",
    parts=PARTS,
    part_counts={
        "train": dict.fromkeys(PLANES, 871),
        "val": dict.fromkeys(PLANES, 156),
        "test": dict.fromkeys(PLANES, 618),
    },
    overlap="The three planes are cut from the same patients: an expert of one plane has seen the patients of another. "
    "The part 'test' is LiTS's own test set in all planes: train on part='train+val' and test on part='test'.",
    notes="The scan of an image is read from annotations.csv; without that file there are no groups. That 'train' and "
    "'val' are the same scans in all planes was not verified; 'test' is LiTS's own.",
)


def read_organs(root: Root) -> Index:
    folders = {plane: read_medimeta(root, f"organs_{plane}", TASK, ORGANS.classes) for plane in PLANES}
    samples = [image.sample(plane, _scan(image)) for plane, images in folders.items() for image in images]
    return Index(ORGANS, ORGANS.classes, ORGANS.domains, tuple(samples))


def _scan(image: MedimetaImage) -> str | None:
    """The volume that a slice was cut from, such as volume-12 or test-volume-3."""
    return image.subject or PurePosixPath(image.annotations.get("original_filepath", "")).stem or None


STEMS = {"axial": "organamnist", "coronal": "organcmnist", "sagittal": "organsmnist"}
SUFFIXES = {224: "_224", 128: "_128", 64: "_64", 28: ""}  # resolution -> end of the file's name, largest first

ORGAN_MNIST = DatasetCard(
    name="organ_mnist",
    title="MedMNIST organs: eleven organs in CT slices of three planes",
    layout="organamnist_224.npz, organcmnist_224.npz, organsmnist_224.npz (or _128, _64, or no number for 28 pixels)",
    licence="CC BY 4.0",
    source="zenodo.org/records/10519652, or the Python package medmnist",
    domains=tuple(STEMS),
    classes=(
        "bladder",
        "femur-left",
        "femur-right",
        "heart",
        "kidney-left",
        "kidney-right",
        "liver",
        "lung-left",
        "lung-right",
        "pancreas",
        "spleen",
    ),
    counts={"axial": 58830, "coronal": 23583, "sagittal": 25211},
    views=("brightness",),  # left and right are classes: a flip would make a label false
    parts=PARTS,
    part_counts={
        "train": {"axial": 34561, "coronal": 12975, "sagittal": 13932},
        "val": {"axial": 6491, "coronal": 2392, "sagittal": 2452},
        "test": {"axial": 17778, "coronal": 8216, "sagittal": 8827},
    },
    overlap="The three planes are cut from the same patients: an expert of one plane has seen the patients of another. "
    "The publisher's split is by scan and the same in all planes: train on part='train+val' and test on part='test'.",
    notes="Option: resolution=224, 128, 64 or 28; else the largest of which all three files are there. The files name "
    "no scan, so there are no groups: neighbouring slices of one scan are alike, and only the parts keep scans apart. "
    "Counts are those of version 3; versions 1 and 2 held a few more images. The classes stand in another order than "
    "those of 'organs'.",
)


def read_organ_mnist(root: Root, *, resolution: int | None = None) -> Index:
    files = _mnist_files(root, resolution)
    samples = [
        sample for domain, file in files.items() for part in PARTS for sample in _mnist_part(root, file, domain, part)
    ]
    return Index(ORGAN_MNIST, ORGAN_MNIST.classes, ORGAN_MNIST.domains, tuple(samples))


def _mnist_files(root: Root, resolution: int | None) -> dict[str, str]:
    """The three files of the given resolution, or of the largest that is complete."""
    if resolution is not None and resolution not in SUFFIXES:
        raise InputError(f"'organ_mnist' has resolution=224, 128, 64 or 28, not {resolution!r}.")
    for pixels in SUFFIXES if resolution is None else (resolution,):
        names = {domain: f"{stem}{SUFFIXES[pixels]}.npz" for domain, stem in STEMS.items()}
        if all(root.named(name) for name in names.values()):
            return {domain: root.one(name) for domain, name in names.items()}
    files = ", ".join(f"{stem}{SUFFIXES[resolution or 224]}.npz" for stem in STEMS.values())
    other = "" if resolution else " (or all three with _128, _64 or no number)"
    raise DataError(f"{root.location} should hold {files}{other}; it holds {root.glance()}.")


def _mnist_part(root: Root, file: str, domain: str, part: str) -> list[Sample]:
    images, labels = f"{part}_images", f"{part}_labels"
    lacking = [name for name in (images, labels) if name not in array_names(root, file)]
    if lacking:
        raise DataError(f"{file} in {root.location} lacks the array {' and '.join(lacking)}. Fetch it again.")
    values, count = read_array(root, file, labels), array_shape(root, file, images)[0]
    if values.shape not in ((count, 1), (count,)) or not np.issubdtype(values.dtype, np.integer):
        raise DataError(
            f"{file} in {root.location} has {count} images in {images}, but {labels} is {values.dtype} {values.shape}."
        )
    if count and not 0 <= values.min() <= values.max() < len(ORGAN_MNIST.classes):
        raise DataError(
            f"{labels} of {file} in {root.location} has a label outside 0 to {len(ORGAN_MNIST.classes) - 1}."
        )
    return [
        Sample(f"{domain}/{part}/{row}", file, domain, int(label), part=part, array=images, row=row)
        for row, label in enumerate(values.reshape(-1))
    ]
