"""What the skin data sets share: two classes, their tables, and the samples of one of them."""

from dataclasses import dataclass, field

from mergestream.data.datasets.csv_files import Rows, read_csv
from mergestream.data.datasets.index import LeftOut, Sample
from mergestream.data.datasets.roots import Root
from mergestream.runtime.errors import DataError

CLASSES = ("benign", "melanoma")
BENIGN, MELANOMA = range(2)


@dataclass
class SkinSet:
    """Samples of one set, and what else its table names. `as_published`: the published counts are of this list."""

    table: str
    samples: list[Sample] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    as_published: bool = True


@dataclass(frozen=True)
class SkinTable:
    """A CSV file and its rows."""

    path: str
    rows: Rows


def find_table(root: Root, name: str, columns: tuple[str, ...]) -> SkinTable | None:
    """Find the CSV of this name with these columns. Identical copies are fine; two that differ are an error."""
    tables = [SkinTable(path, read_csv(root, path)) for path in root.named(name)]
    tables = [table for table in tables if table.rows and set(columns) <= set(table.rows[0])]
    for other in tables[1:]:
        if other.rows != tables[0].rows:
            raise DataError(f"{root.location} holds two different {name}: {tables[0].path}, {other.path}. Keep one.")
    return tables[0] if tables else None


def binary_label(text: str, table: str, image: str) -> int:
    """0 or 1, also as 0.0 or 1.0."""
    if text not in ("0", "1", "0.0", "1.0"):
        raise DataError(f"{table} gives {image} the label '{text}', neither 0 (benign) nor 1 (melanoma).")
    return int(float(text))
