"""Organs of MedIMeta: eleven organs in computed tomography, cut in three planes (Woerner et al. 2024, from LiTS)."""

from pathlib import PurePosixPath

from mergestream.data.datasets.index import DatasetCard, Index
from mergestream.data.datasets.medimeta import LICENCE, PARTS, SOURCE, MedimetaImage, read_medimeta
from mergestream.data.datasets.roots import Root

PLANES = ("axial", "coronal", "sagittal")
TASK = "organ label"

CARD = DatasetCard(
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


def read(root: Root) -> Index:
    folders = {plane: read_medimeta(root, f"organs_{plane}", TASK, CARD.classes) for plane in PLANES}
    samples = [image.sample(plane, _scan(image)) for plane, images in folders.items() for image in images]
    return Index(CARD, CARD.classes, CARD.domains, tuple(samples))


def _scan(image: MedimetaImage) -> str | None:
    """The volume that a slice was cut from, such as volume-12 or test-volume-3."""
    return image.subject or PurePosixPath(image.annotations.get("original_filepath", "")).stem or None
