"""MIDOG 2025, track 2: atypical and normal mitotic figures of seven tumours (Weiss et al. 2025)."""

from collections import defaultdict
from dataclasses import replace
from pathlib import PurePosixPath

from mergestream.data.datasets.index import CARDS, Index, LeftOut, Sample
from mergestream.data.datasets.roots import Root, by_stem
from mergestream.data.datasets.table_files import Rows, read_csv
from mergestream.runtime.errors import DataError
from mergestream.runtime.option_checks import one_of

TABLE = "MIDOG25_Atypical_Classification_Train_Set.csv"
# Kinds of domain, and their columns.
KINDS = {"tumor": "Tumor", "scanner": "Scanner", "origin": "Origin", "species": "Species"}
COLUMNS = ("image_id", "filename", "coordinateX", "coordinateY", *KINDS.values(), "majority")
TYPOS = {"Hamammatsu XR": "Hamamatsu XR"}

CARD = CARDS["midog"]


def read(root: Root, *, domain: str = "tumor") -> Index:
    one_of("domain", domain, tuple(KINDS))
    table = root.one(TABLE)
    there = by_stem(root.images)
    samples, left_out, missing = [], [], []
    for image, rows in _by_image(read_csv(root, table, COLUMNS), table).items():
        # Some copies store `8925.png` as .webp.
        path = there.pop(PurePosixPath(image).stem.lower(), None)
        if len(rows) > 1:
            cells = (f"{r['filename']} at ({r['coordinateX']}, {r['coordinateY']}), {r['majority']}" for r in rows)
            left_out += [LeftOut(path, f"its rows in the CSV differ: {' and '.join(cells)}")] if path else []
        elif path is None:
            missing.append(image)
        else:
            kinds = {kind: rows[0][column] for kind, column in KINDS.items()}
            label, group = CARD.classes.index(rows[0]["majority"]), rows[0]["filename"]
            samples.append(Sample(image, path, kinds[domain], label, group=group, subgroups=kinds))
    left_out += [LeftOut(path, "no row in the CSV") for path in there.values()]
    others = () if domain == "tumor" else tuple(sorted({sample.domain for sample in samples}))
    card = replace(CARD, domains=others, counts={}) if others else CARD
    return Index(card, samples, left_out, missing)


def _by_image(rows: Rows, table: str) -> dict[str, Rows]:
    """The distinct rows of each image, in the order of the table."""
    rows_by_image: defaultdict[str, Rows] = defaultdict(list)
    for number, row in enumerate(rows, start=2):
        used = {column: TYPOS.get(row[column], row[column]) for column in COLUMNS}
        empty = [column for column, value in used.items() if not value]
        if empty:
            raise DataError(f"Line {number} of {table} has an empty {empty[0]}.")
        for column, allowed in (("majority", CARD.classes), ("Tumor", CARD.domains)):
            if used[column] not in allowed:
                raise DataError(f"Line {number} of {table} has the {column} '{used[column]}', none of {list(allowed)}.")
        if used not in rows_by_image[used["image_id"]]:
            rows_by_image[used["image_id"]].append(used)
    return rows_by_image
