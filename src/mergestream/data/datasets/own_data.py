"""Your own images: in folders domain/class/image, or with a CSV file."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from mergestream.data.datasets.index import CARDS, DatasetCard, Index, LeftOut, Sample
from mergestream.data.datasets.roots import IMAGES, Root
from mergestream.data.datasets.table_files import Rows, read_csv
from mergestream.runtime.errors import DataError, InputError, some, unknown_name

FOLDER, TABLE = CARDS["folder"], CARDS["table"]
# Columns that seem to name what a split must keep together.
SUBJECT = re.compile(
    r"(patient|subject|person|participant|case|slide|lesion|study|exam|specimen|scan|volume|accession|mrn)s?"
    r"([ _-]?(id|uid|number|no|nr|name|code|key))?",
    re.IGNORECASE,
)
# P001_1 and P001-left: an identifier with a digit, and what tells its images apart.
SEVERAL = re.compile(r"(.*\d.*)[ _.-][^ _.-]+")
LEAK = "must not be in training and validation at once"


def read_folder(root: Root, *, group: str | tuple[str, ...] | None = "", classes: Sequence[str] | None = None) -> Index:
    inside = _only_folder(root)
    split = {path: PurePosixPath(path).relative_to(inside).parts for path in _image_files(root)}
    odd = [path for path, parts in split.items() if len(parts) != 3]
    if odd or not split:
        seen = f"{odd[0]} is not" if odd else f"it holds {root.glance()}, and no image"
        raise DataError(f"{root.location} is not a root of 'folder', which holds domain/class/image: {seen}.")
    present = tuple(sorted({parts[1] for parts in split.values()}))
    named = present if classes is None else _names(classes)
    strangers = [name for name in present if name not in named]
    if strangers:
        raise DataError(f"{root.location} has folders of other classes ({some(strangers)}) than {some(named)}.")
    domains = tuple(sorted({parts[0] for parts in split.values()}))
    _require_no_empty_domain(root, inside, domains)
    images = ["/".join(parts) for parts in split.values()]
    if group == "":
        _require_no_series(images)
    if isinstance(group, tuple):  # '(P\\d+)' reads as a list on the command line
        group = f"({','.join(map(str, group))})"
    pattern = None if group in (None, "", "none") else str(group)
    samples = [
        Sample("/".join(parts), path, parts[0], named.index(parts[1]), _matched(pattern, PurePosixPath(path).stem))
        for path, parts in split.items()
    ]
    left_out = [LeftOut(path, "not a supported image file") for path in root.files if path not in split]
    return Index(_own_card(FOLDER, named, domains, samples), samples, left_out)


def _matched(pattern: str | None, stem: str) -> str | None:
    """The group in a file name: the pattern's first bracket, or all that it matches."""
    if pattern is None:
        return None
    try:
        match = re.search(pattern, stem)
    except re.error as error:
        raise InputError(f"group= is a regular expression, as in '(.+)_', or none: '{pattern}': {error}.") from error
    if match is None:
        raise DataError(f"group='{pattern}' does not match the file name '{stem}'.")
    return match[match.re.groups and 1]


def _require_no_series(images: Sequence[str]) -> None:
    """Refuse file names that look like several images of a patient, unless a whole folder has the same beginning."""
    subjects = {image: match[1] for image in images if (match := SEVERAL.fullmatch(PurePosixPath(image).stem))}
    first, in_folder = dict[tuple[str, str], str](), defaultdict[str, set[str]](set)
    for image, subject in subjects.items():
        in_folder[str(PurePosixPath(image).parent)].add(subject)
    for image, subject in subjects.items():
        other = first.setdefault((image.split("/")[0], subject), image)
        if other != image and len(in_folder[str(PurePosixPath(image).parent)]) > 1:
            raise DataError(
                f"'{other}' and '{image}' look like two images of one patient, who {LEAK}. Say how file names begin "
                f"with the patient, as in group='(.+)_' (--data-option 'group=(.+)_'), use 'table' with a column of "
                f"patients, or say group=none if all images are independent."
            )


def _own_card(
    card: DatasetCard, classes: tuple[str, ...], domains: tuple[str, ...], samples: list[Sample]
) -> DatasetCard:
    """The card of the user's data; it says if a group is in several domains."""
    places = defaultdict[str, set[str]](set)
    for sample in samples:
        if sample.group:
            places[sample.group].add(sample.domain)
    several = [group for group, where in places.items() if len(where) > 1]
    overlap = f"{len(several)} of {len(places)} groups have images in several domains." if several else ""
    return replace(card, classes=classes, domains=domains, overlap=overlap)


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


def read_table(
    root: Root, *, csv: str | None = None, classes: Sequence[str] | None = None, group: str | None = ""
) -> Index:
    path = root.one(str(csv)) if csv else _only_csv(root)
    rows = read_csv(root, path, REQUIRED)
    group = _group_column(rows, path, group)
    named = tuple(sorted({row["label"] for row in rows})) if classes is None else _names(classes)
    subgroups, left_out = _subgroups(rows, group)
    times = _times([row.get("acquired", "") for row in rows])
    folder, there = PurePosixPath(path).parent, set(root.files)
    samples, missing = [], []
    for number, (row, acquired) in enumerate(zip(rows, times, strict=True), start=2):
        if not all(row[name] for name in REQUIRED):
            raise DataError(f"Line {number} of {path} has an empty image, label or domain.")
        if row["label"] not in named:
            raise DataError(f"Line {number} of {path} has the label '{row['label']}', none of {some(named)}.")
        file, values = (folder / row["image"]).as_posix(), {kind: row[kind] or "unknown" for kind in subgroups}
        if file not in there:
            missing.append(file)
            continue
        place = (row["image"], file, row["domain"], named.index(row["label"]))
        samples.append(Sample(*place, group=row.get(group) or None, acquired=acquired, subgroups=values))
    used = {sample.file for sample in samples}
    left_out += [LeftOut(image, "no row in the table") for image in root.images if image not in used]
    domains = tuple(sorted({row["domain"] for row in rows}))
    return Index(_own_card(TABLE, named, domains, samples), samples, left_out, missing)


def _group_column(rows: Rows, path: str, group: str | None) -> str:
    """The column of groups, or ''. A column that looks like patients is neither ignored nor used unasked."""
    columns = list(rows[0]) if rows else []
    if group in (None, "none"):
        return ""
    if group and group not in columns:
        raise unknown_name(f"column of {path}", group, columns)
    if group or "group" in columns:
        return group or "group"
    for name in columns:
        values = [row[name] for row in rows if row[name]]
        if SUBJECT.fullmatch(name) and len(set(values)) < len(values):
            raise DataError(
                f"The column '{name}' of {path} looks like patients, cases or slides, which {LEAK}. If so, say "
                f"group={name} (--data-option group={name}); if the rows are independent, say group=none."
            )
    return ""


def _names(classes: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(classes, list | tuple):
        raise InputError(f"classes= is a list of names, as in classes=(normal, tumour); got {classes!r}.")
    return tuple(map(str, classes))


def _subgroups(rows: Rows, group: str) -> tuple[list[str], list[LeftOut]]:
    """Columns with few values; a column with a different value for each image is not a subgroup."""
    kinds = [name for name in (rows[0] if rows else ()) if name and name not in (*REQUIRED, *OPTIONAL, group)]
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
