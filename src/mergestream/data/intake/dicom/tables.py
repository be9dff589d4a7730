"""Lookup tables in DICOM headers: a descriptor of three numbers, and the entries."""

from typing import Any, NamedTuple

import numpy as np
from pydicom.dataset import Dataset

from mergestream.data.intake.dicom.elements import damaged


class Table(NamedTuple):
    """Entries [N]; the first stands for the stored value `first`, and all are below 2^bits."""

    entries: np.ndarray
    first: int
    bits: int

    def look_up(self, values: np.ndarray) -> np.ndarray:
        """Entries for values of any shape; beyond the ends stand the first and the last (PS3.3 C.11.1.1)."""
        places = np.clip(np.rint(values).astype(np.int64) - self.first, 0, len(self.entries) - 1)
        return self.entries[places]


def read_table(holder: Dataset, descriptor: str, entries: str, *, little: bool, signed: bool) -> Table:
    """A table from two elements of a data set or an item."""
    order = "<" if little else ">"
    count, first, bits = (int(number) for number in _words(holder.get(descriptor), f"{order}u2"))
    count, first = count & 0xFFFF or 1 << 16, first & 0xFFFF
    if signed and first >= 1 << 15:
        first -= 1 << 16
    if not 1 <= bits <= 16:
        raise damaged()
    return Table(_entries(holder.get(entries), count, bits, order), first, bits)


def _entries(value: Any, count: int, bits: int, order: str) -> np.ndarray:
    narrow = bits <= 8 and isinstance(value, bytes) and len(value) in (count, count + count % 2)
    found = _words(value, "u1" if narrow else f"{order}u2")[:count]
    if len(found) < count:
        raise damaged()
    # Some writers put entries of 8 bits into the upper half of 16.
    if bits <= 8 and found.max() > 255:
        found = found >> 8
    if int(found.max()) >> bits:
        raise damaged()
    return found


def _words(value: Any, dtype: str) -> np.ndarray:
    """Numbers that pydicom gives as bytes, as one number or as several."""
    if isinstance(value, bytes):
        return np.frombuffer(value[: len(value) - len(value) % np.dtype(dtype).itemsize], dtype).astype(np.int64)
    return np.atleast_1d(np.asarray(value, dtype=np.int64))
