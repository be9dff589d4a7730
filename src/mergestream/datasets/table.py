"""Your own images and a CSV: image, label, domain, and optionally group, acquired and columns to report apart."""

from pathlib import PurePosixPath

from mergestream.datasets.about import About
from mergestream.datasets.index import Index, Sample
from mergestream.datasets.roots import Root
from mergestream.datasets.tables import read_csv
from mergestream.errors import DataError

REQUIRED, OPTIONAL = ("image", "label", "domain"), ("group", "acquired")

ABOUT = About(
    name="table",
    title="Your own images and a table",
    layout="images, and one CSV with the columns image (its path beside the CSV), label, domain, and optionally group "
    "(patient, slide), acquired (a time that sorts); every other column is a subgroup to report apart",
    licence="yours",
    source="your own disk",
    group="the column 'group'",
    notes="Options: csv='samples.csv' where there are several, classes=('normal', 'tumour') for another order.",
)


def read(root: Root, *, csv: str | None = None, classes: tuple[str, ...] | None = None) -> Index:
    path = root.one(csv) if csv else _only_csv(root)
    rows = read_csv(root, path, REQUIRED)
    beside = PurePosixPath(path).parent
    there, samples, missing = set(root.files), [], []
    named = tuple(classes) if classes else tuple(sorted({row["label"] for row in rows}))
    for number, row in enumerate(rows, start=2):
        if not all(row[name] for name in REQUIRED):
            raise DataError(f"Line {number} of {path} has an empty image, label or domain.")
        if row["label"] not in named:
            raise DataError(f"Line {number} of {path} has the label '{row['label']}', none of {list(named)}.")
        file = (beside / row["image"]).as_posix()
        if file not in there:
            missing.append(file)
            continue
        subgroups = {name: value for name, value in row.items() if name not in (*REQUIRED, *OPTIONAL)}
        samples.append(
            Sample(
                row["image"],
                file,
                row["domain"],
                named.index(row["label"]),
                group=row.get("group") or None,
                acquired=row.get("acquired") or None,
                subgroups=subgroups,
            )
        )
    domains = tuple(sorted({row["domain"] for row in rows}))
    return Index(ABOUT, named, domains, tuple(samples), missing=tuple(missing))


def _only_csv(root: Root) -> str:
    found = [path for path in root.files if path.lower().endswith(".csv")]
    if len(found) != 1:
        seen = ", ".join(found[:5]) or root.glance()
        raise DataError(f"{root.location} should hold one CSV file; it holds {seen}. Name it: csv='samples.csv'.")
    return found[0]
