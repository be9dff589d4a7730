"""Tables published as spreadsheets: .xls, .xlsx, or a .csv with the same columns."""

import io
import re
from collections.abc import Iterator
from typing import Any

from mergestream.data.datasets.csv_files import Rows, read_csv
from mergestream.data.datasets.roots import Root
from mergestream.runtime.errors import DataError

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
                    {column: _cell(row, place) for column, place in column_places.items()} for row in grid[number + 1 :]
                ]
                return [row for row in rows if any(row.values())]
            seen = seen or [cell for cell in cells if cell]
    raise DataError(f"{path} in {root.location} lacks one of the columns {list(columns)}; its first row is {seen[:8]}.")


def _grids(root: Root, path: str) -> Iterator[Grid]:
    """The sheets of a file as text. The content decides on the format, since files get renamed."""
    content = root.read(path)
    if content.startswith(b"PK"):
        yield from _xlsx(content, path)
    elif content.startswith(b"\xd0\xcf\x11\xe0"):
        yield from _xls(content, path)
    else:
        rows = read_csv(root, path)
        yield [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []


def _xls(content: bytes, path: str) -> Iterator[Grid]:
    try:
        import xlrd
    except ImportError as error:
        raise DataError(f"Reading {path} needs xlrd: pip install 'mergestream[data]'.") from error
    try:
        sheets = xlrd.open_workbook(file_contents=content).sheets()
    except Exception as error:  # xlrd raises anything on a damaged file
        raise DataError(f"{path} is not a readable .xls file: {error}.") from error
    for sheet in sheets:
        yield [[_text(value) for value in sheet.row_values(row)] for row in range(sheet.nrows)]


def _xlsx(content: bytes, path: str) -> Iterator[Grid]:
    try:
        import openpyxl
    except ImportError as error:
        raise DataError(f"Reading {path} needs openpyxl: pip install 'mergestream[data]'.") from error
    try:
        book = openpyxl.load_workbook(io.BytesIO(content), data_only=True)
    except Exception as error:  # openpyxl raises anything on a damaged file
        raise DataError(f"{path} is not a readable .xlsx file: {error}.") from error
    for sheet in book.worksheets:
        yield [[_text(value) for value in row] for row in sheet.iter_rows(values_only=True)]


def _text(value: Any) -> str:
    """A cell as text: spreadsheets store 3 as 3.0."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value).strip()


def _cell(row: list[str], place: int) -> str:
    return row[place] if place < len(row) else ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())
