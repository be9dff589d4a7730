"""Tables as rows of text: CSV files, and spreadsheets (.xls, .xlsx)."""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

from mergestream.data.datasets.arrays import needed_library
from mergestream.data.datasets.roots import Root
from mergestream.runtime.errors import DataError

Rows = list[dict[str, str]]


def read_csv(root: Root, path: str, required: tuple[str, ...] = ()) -> Rows:
    """Read a CSV file's rows by column name, values stripped; the error names a missing column."""
    text = decode_text(root.read(path))
    try:
        first = text.partition("\n")[0]  # spreadsheets write semicolons in some languages
        delimiter = ";" if first.count(";") > first.count(",") else ","
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
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


Grid = list[list[str]]


def read_sheet(root: Root, path: str, columns: tuple[str, ...]) -> Rows:
    """Read the rows below the first row that names all `columns`, in any sheet; skip empty rows.

    Names are compared without case, spaces and punctuation; other columns are not read.
    """
    seen: list[str] = []
    for grid in _grids(root, path):
        for number, cells in enumerate(grid):
            places = {_plain(name): place for place, name in reversed(list(enumerate(cells)))}
            if all(_plain(column) in places for column in columns):
                column_places = {column: places[_plain(column)] for column in columns}
                rows = [
                    {column: row[place] if place < len(row) else "" for column, place in column_places.items()}
                    for row in grid[number + 1 :]
                ]
                return [row for row in rows if any(row.values())]
            seen = seen or [cell for cell in cells if cell]
    raise DataError(f"{path} in {root.location} lacks one of the columns {list(columns)}; its first row is {seen[:8]}.")


def _grids(root: Root, path: str) -> Iterable[Grid]:
    """The sheets of a file as text. The content decides on the format, since files get renamed."""
    content = root.read(path)
    if content.startswith(b"PK"):
        name, read = "openpyxl", _xlsx
    elif content.startswith(b"\xd0\xcf\x11\xe0"):
        name, read = "xlrd", _xls
    else:
        rows = read_csv(root, path)
        return [[list(rows[0]), *(list(row.values()) for row in rows)]] if rows else []
    module = needed_library(name, f"Reading {path}")
    try:
        return [[[_text(value) for value in row] for row in sheet] for sheet in read(module, content)]
    except Exception as error:  # the libraries raise anything on a damaged file
        raise DataError(f"{path} is not a readable {read.__name__.replace('_', '.')} file: {error}.") from error


def _xls(library: Any, content: bytes) -> Iterator[Iterable[Any]]:
    for sheet in library.open_workbook(file_contents=content).sheets():
        yield (sheet.row_values(row) for row in range(sheet.nrows))


def _xlsx(library: Any, content: bytes) -> Iterator[Iterable[Any]]:
    for sheet in library.load_workbook(io.BytesIO(content), data_only=True).worksheets:
        yield sheet.iter_rows(values_only=True)


def _text(value: Any) -> str:
    """A cell as text: spreadsheets store 3 as 3.0."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value).strip()


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())
