"""Your own images in folders: domain/class/image."""

from pathlib import PurePosixPath

from mergestream.data.datasets.card import DatasetCard
from mergestream.data.datasets.index import Index, LeftOut, Sample, some
from mergestream.data.datasets.roots import IMAGES, Root
from mergestream.runtime.errors import DataError

CARD = DatasetCard(
    name="folder",
    title="Your own images in folders",
    layout="one folder per domain (site, scanner), in it one folder per class, in it images",
    licence="yours",
    source="your own disk",
    notes="Classes are all class folders of all domains, sorted. No groups: for patients or slides use 'table'.",
)


def read(root: Root) -> Index:
    inside = _only_folder(root)
    split = {path: PurePosixPath(path).relative_to(inside).parts for path in _images(root)}
    odd = [path for path, parts in split.items() if len(parts) != 3]
    if odd or not split:
        seen = f"{odd[0]} is not" if odd else f"it holds {root.glance()}, and no image"
        raise DataError(f"{root.location} is not a root of 'folder', which holds domain/class/image: {seen}.")
    classes = tuple(sorted({parts[1] for parts in split.values()}))
    domains = tuple(sorted({parts[0] for parts in split.values()}))
    _require_no_empty_domain(root, inside, domains)
    samples = [Sample("/".join(p), path, p[0], classes.index(p[1])) for path, p in split.items()]
    left_out = [LeftOut(path, "not a supported image file") for path in root.files if path not in split]
    return Index(CARD, classes, domains, tuple(samples), tuple(left_out))


def _images(root: Root) -> list[str]:
    """Image files, DICOM included."""
    return [path for path in root.files if PurePosixPath(path).suffix.lower() in {*IMAGES, ".dcm"}]


def _require_no_empty_domain(root: Root, inside: str, domains: tuple[str, ...]) -> None:
    """Refuse a site without images instead of ignoring it."""
    depth = len(PurePosixPath(inside).parts) + 1 if inside else 1
    empty = [PurePosixPath(f).name for f in root.empty_folders if len(PurePosixPath(f).parts) == depth]
    empty += [name for name in root.children(inside) if name not in domains]
    if empty:
        raise DataError(f"'folder' has no image in the domain {some(sorted(empty))} under {root.location}.")


def _only_folder(root: Root) -> str:
    """The folder inside the root that holds everything, as in many zips, or ''."""
    depths = {len(PurePosixPath(path).parts) for path in _images(root)}
    inside = root.children("")
    return next(iter(inside)) if depths == {4} and len(inside) == 1 else ""
