"""Organs in computed tomography, in three planes: MedIMeta (Woerner et al. 2024) and MedMNIST (Yang et al. 2023)."""

from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np

from mergestream.data.datasets.arrays import array_shape, read_array
from mergestream.data.datasets.index import CARDS, Index, Sample
from mergestream.data.datasets.medimeta import PARTS, MedimetaImage, read_medimeta
from mergestream.data.datasets.roots import Root
from mergestream.runtime.errors import DataError, InputError

TASK = "organ label"
ORGANS, ORGAN_MNIST = CARDS["organs"], CARDS["organ_mnist"]
PLANES = ORGANS.domains


def read_organs(root: Root) -> Index:
    folders = {plane: read_medimeta(root, f"organs_{plane}", TASK, classes=ORGANS.classes) for plane in PLANES}
    samples = [
        replace(image.sample, domain=plane, group=_scan(image)) for plane, images in folders.items() for image in images
    ]
    return Index(ORGANS, samples)


def _scan(image: MedimetaImage) -> str | None:
    """The volume that a slice was cut from, such as volume-12 or test-volume-3."""
    return image.subject or PurePosixPath(image.annotations.get("original_filepath", "")).stem or None


STEMS = {"axial": "organamnist", "coronal": "organcmnist", "sagittal": "organsmnist"}
SUFFIXES = {224: "_224", 128: "_128", 64: "_64", 28: ""}  # resolution -> end of the file's name, largest first


def read_organ_mnist(root: Root, *, resolution: int | None = None) -> Index:
    files = _mnist_files(root, resolution)
    samples = [
        sample for domain, file in files.items() for part in PARTS for sample in _mnist_part(root, file, domain, part)
    ]
    return Index(ORGAN_MNIST, samples)


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
    count, values = array_shape(root, file, images)[0], read_array(root, file, labels)
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
