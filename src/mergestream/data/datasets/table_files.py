"""Tables and arrays in files: CSV, spreadsheets (.xls, .xlsx), .npy, .npz and .hdf5. Pickles are refused."""

import csv
import io
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from mergestream.data.datasets.roots import Root
from mergestream.runtime.errors import DataError, some

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
            raise DataError(f"{path} in {root.location} lacks the column {', '.join(lacking)}; it has {some(names)}.")
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


def read_array(root: Root, file: str, name: str) -> np.ndarray:
    """Read a named array of an .npz or .hdf5 file; `name` is not used for an .npy file."""
    with _array_file(root, file, name) as content:
        if isinstance(content, Mapping):
            return np.asarray(content[name])
        loaded = np.load(content, allow_pickle=False)
        return loaded if isinstance(loaded, np.ndarray) else loaded[name]


def read_labels(root: Root, file: str, name: str, classes: int) -> list[int]:
    """Read labels [N] or [N,1], whole numbers from 0 that are below `classes`."""
    stored, where = read_array(root, file, name), f"{name} of {file} in {root.location}"
    labels = stored[:, 0] if stored.ndim == 2 and stored.shape[1] == 1 else stored
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{where} should hold one number per image: {stored.dtype} {stored.shape}.")
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise DataError(f"{where} has labels from {labels.min()} to {labels.max()}; {classes} are known, from 0.")
    return [int(label) for label in labels]


def array_shape(root: Root, file: str, name: str) -> tuple[int, ...]:
    """Read the shape of a named array of an .npz or .hdf5 file from its header."""
    with _array_file(root, file, name) as content:
        if isinstance(content, Mapping):
            return tuple(content[name].shape)
        with zipfile.ZipFile(content) as archive, archive.open(f"{name}.npy") as member:
            version = np.lib.format.read_magic(member)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            return tuple(read[version](member)[0])


@contextmanager
def _array_file(root: Root, file: str, name: str) -> Iterator[Any]:
    """Open a file: its arrays by name if it is .hdf5, else its bytes. What fails inside is an error about the array."""
    with root.open(file) as content:
        try:
            if file.lower().endswith((".hdf5", ".h5")):
                with needed_library("h5py", "Reading .hdf5").File(content, "r") as opened:
                    yield opened
            else:
                yield content
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"Cannot read the array '{name}' of {file} in {root.location}: {error}.") from error


def needed_library(name: str, purpose: str, extra: str = "data") -> Any:
    """Import an optional library; the error says what it is needed for, and how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(f"{purpose} needs {name.split('.')[0]}: pip install 'mergestream[{extra}]'.") from error
