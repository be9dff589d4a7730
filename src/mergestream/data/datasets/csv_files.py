"""CSV files as rows of text."""

import csv
import io

from mergestream.data.datasets.roots import Root
from mergestream.runtime.errors import DataError

Rows = list[dict[str, str]]


def read_csv(root: Root, path: str, required: tuple[str, ...] = ()) -> Rows:
    """Read a CSV file's rows by column name, values stripped; the error names a missing column."""
    text = decode_text(root.read(path))
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), dialect=_dialect(text))
        names = [(name or "").strip() for name in reader.fieldnames or ()]
        repeated = sorted({name for name in names if name and names.count(name) > 1})
        if repeated:
            raise DataError(f"{path} in {root.location} has the column {', '.join(repeated)} twice.")
        lacking = [name for name in required if name not in names]
        if lacking:
            raise DataError(f"{path} in {root.location} lacks the column {', '.join(lacking)}; it has {names}.")
        reader.fieldnames = names
        rows = list(reader)
    except csv.Error as error:
        raise DataError(f"{path} in {root.location} is not a CSV file: {error}.") from error
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise DataError(
                f"Line {number} of {path} in {root.location} has {len(row)} fields for {len(names)} columns."
            )
    return [{name: (value or "").strip() for name, value in row.items()} for row in rows]


def decode_text(content: bytes) -> str:
    """Decode UTF-8, with or without byte order mark, or Windows-1252."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("cp1252", errors="replace")


def _dialect(text: str) -> type[csv.Dialect]:
    """Commas, or semicolons as spreadsheets write them in some languages."""
    first = text.partition("\n")[0]

    class Dialect(csv.excel):
        delimiter = ";" if first.count(";") > first.count(",") else ","

    return Dialect
