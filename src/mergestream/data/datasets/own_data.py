"""Your own images: in folders domain/class/image, or with a CSV file."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from mergestream.data.datasets.index import CARDS, Index, LeftOut, Sample, some
from mergestream.data.datasets.roots import IMAGES, Root
from mergestream.data.datasets.table_files import Rows, read_csv
from mergestream.runtime.errors import DataError

FOLDER, TABLE = CARDS["folder"], CARDS["table"]


def read_folder(root: Root) -> Index:
    inside = _only_folder(root)
    split = {path: PurePosixPath(path).relative_to(inside).parts for path in _image_files(root)}
    odd = [path for path, parts in split.items() if len(parts) != 3]
    if odd or not split:
        seen = f"{odd[0]} is not" if odd else f"it holds {root.glance()}, and no image"
        raise DataError(f"{root.location} is not a root of 'folder', which holds domain/class/image: {seen}.")
    classes = tuple(sorted({parts[1] for parts in split.values()}))
    domains = tuple(sorted({parts[0] for parts in split.values()}))
    _require_no_empty_domain(root, inside, domains)
    samples = [Sample("/".join(p), path, p[0], classes.index(p[1])) for path, p in split.items()]
    left_out = [LeftOut(path, "not a supported image file") for path in root.files if path not in split]
    return Index(replace(FOLDER, classes=classes, domains=domains), samples, left_out)


def _image_files(root: Root) -> list[str]:
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
    depths = {len(PurePosixPath(path).parts) for path in _image_files(root)}
    inside = root.children("")
    return next(iter(inside)) if depths == {4} and len(inside) == 1 else ""


MOST_SUBGROUPS = 30
REQUIRED, OPTIONAL = ("image", "label", "domain"), ("group", "acquired")


def read_table(root: Root, *, csv: str | None = None, classes: Sequence[str] | None = None) -> Index:
    path = root.one(str(csv)) if csv else _only_csv(root)
    rows = read_csv(root, path, REQUIRED)
    for number, row in enumerate(rows, start=2):
        if not all(row[name] for name in REQUIRED):
            raise DataError(f"Line {number} of {path} has an empty image, label or domain.")
    named = tuple(sorted({row["label"] for row in rows})) if classes is None else _names(classes)
    subgroups, left_out = _subgroups(rows)
    times = _times([row.get("acquired", "") for row in rows])
    folder, there = PurePosixPath(path).parent, set(root.files)
    samples, missing = [], []
    for number, (row, acquired) in enumerate(zip(rows, times, strict=True), start=2):
        if row["label"] not in named:
            raise DataError(f"Line {number} of {path} has the label '{row['label']}', none of {list(named)}.")
        file, values = (folder / row["image"]).as_posix(), {kind: row[kind] or "unknown" for kind in subgroups}
        if file not in there:
            missing.append(file)
            continue
        place = (row["image"], file, row["domain"], named.index(row["label"]))
        samples.append(Sample(*place, group=row.get("group") or None, acquired=acquired, subgroups=values))
    used = {sample.file for sample in samples}
    left_out += [LeftOut(image, "no row in the table") for image in root.images if image not in used]
    domains = tuple(sorted({row["domain"] for row in rows}))
    return Index(replace(TABLE, classes=named, domains=domains), samples, left_out, missing)


def _names(classes: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(classes, list | tuple):
        raise DataError(f"classes= is a list of names, as in classes=(normal, tumour); got {classes!r}.")
    return tuple(map(str, classes))


def _subgroups(rows: Rows) -> tuple[list[str], list[LeftOut]]:
    """Columns with few values; a column with a different value for each image is not a subgroup."""
    kinds = [name for name in (rows[0] if rows else ()) if name and name not in (*REQUIRED, *OPTIONAL)]
    values = {kind: len({row[kind] for row in rows}) for kind in kinds}
    many = [kind for kind in kinds if values[kind] > min(MOST_SUBGROUPS, max(len(rows) // 2, 1))]
    left_out = [LeftOut(f"the column '{kind}'", f"{values[kind]} values are too many for a subgroup") for kind in many]
    return [kind for kind in kinds if kind not in many], left_out


def _times(texts: Sequence[str]) -> Sequence[float | str | None]:
    """Numbers if all are numbers, since '10' sorts before '9' as text; else text, which suits ISO dates."""
    try:
        return [float(text) for text in texts]
    except ValueError:
        return [text or None for text in texts]


def _only_csv(root: Root) -> str:
    tables = [path for path in root.files if path.lower().endswith(".csv")]
    if len(tables) != 1:
        contents = ", ".join(tables[:5]) or root.glance()
        raise DataError(f"{root.location} should hold one CSV file; it holds {contents}. Name it: csv='samples.csv'.")
    return tables[0]
