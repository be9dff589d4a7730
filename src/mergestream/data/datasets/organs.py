"""Organs in computed tomography, in three planes: MedIMeta (Woerner et al. 2024) and MedMNIST (Yang et al. 2023)."""

from dataclasses import replace
from pathlib import PurePosixPath

from mergestream.data.datasets.index import CARDS, Index, Sample
from mergestream.data.datasets.medimeta import PARTS, read_medimeta
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.table_files import array_shape, read_labels
from mergestream.runtime.errors import DataError, InputError

TASK = "organ label"
ORGANS, ORGAN_MNIST = CARDS["organs"], CARDS["organ_mnist"]
PLANES = ORGANS.domains


def read_organs(root: Root) -> Index:
    folders = {plane: read_medimeta(root, f"organs_{plane}", TASK, classes=ORGANS.classes) for plane in PLANES}
    samples = []
    for plane, image in ((plane, image) for plane, images in folders.items() for image in images):
        # The volume that a slice was cut from, such as volume-12 or test-volume-3.
        scan = image.subject or PurePosixPath(image.annotations.get("original_filepath", "")).stem or None
        samples.append(replace(image.sample, domain=plane, group=scan))
    return Index(ORGANS, samples)


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
    images = f"{part}_images"
    count = array_shape(root, file, images)[0]
    labels = read_labels(root, file, f"{part}_labels", len(ORGAN_MNIST.classes))
    if len(labels) != count:
        raise DataError(f"{file} in {root.location} has {count} images in {images}, but {len(labels)} {part}_labels.")
    return [
        Sample(f"{domain}/{part}/{row}", file, domain, label, part=part, array=images, row=row)
        for row, label in enumerate(labels)
    ]
