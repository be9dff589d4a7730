"""Lookup tables in DICOM headers: a descriptor of three numbers, and the entries.

Not by pydicom's `apply_voi` and `apply_color_lut`: they count in the entries' own type, so a table of 8 bits with more
than 256 entries gives wrong shades there; they refuse padded tables, and read palettes in the machine's byte order.
"""

from typing import Any, NamedTuple

import numpy as np
from pydicom.dataset import Dataset

from mergestream.data.intake.refusals import damaged_dicom


class LookupTable(NamedTuple):
    """Entries [N], all below 2^bits; the first one is for the stored value `first`."""

    entries: np.ndarray
    first: int
    bits: int

    def look_up(self, values: np.ndarray) -> np.ndarray:
        """Entries for values of any shape; values beyond the ends get the first or last entry (PS3.3 C.11.1.1)."""
        places = np.clip(np.rint(values).astype(np.int64) - self.first, 0, len(self.entries) - 1)
        return self.entries[places]


def read_table(holder: Dataset, descriptor: str, entries: str, *, little_endian: bool, signed: bool) -> LookupTable:
    """Read a table from two elements of a data set or an item."""
    order = "<" if little_endian else ">"
    count, first, bits = (int(number) for number in _words(holder.get(descriptor), f"{order}u2"))
    count, first = count & 0xFFFF or 1 << 16, first & 0xFFFF
    if signed and first >= 1 << 15:
        first -= 1 << 16
    if not 1 <= bits <= 16:
        raise damaged_dicom()
    return LookupTable(_entries(holder.get(entries), count, bits, order), first, bits)


def _entries(value: Any, count: int, bits: int, order: str) -> np.ndarray:
    narrow = bits <= 8 and isinstance(value, bytes) and len(value) in (count, count + count % 2)
    words = _words(value, "u1" if narrow else f"{order}u2")[:count]
    if len(words) < count:
        raise damaged_dicom()
    # Some writers put 8-bit entries into the upper half of 16.
    if bits <= 8 and words.max() > 255:
        words = words >> 8
    if int(words.max()) >> bits:
        raise damaged_dicom()
    return words


def _words(value: Any, dtype: str) -> np.ndarray:
    """Numbers that pydicom returns as bytes, as one number or as several."""
    if isinstance(value, bytes):
        return np.frombuffer(value[: len(value) - len(value) % np.dtype(dtype).itemsize], dtype).astype(np.int64)
    return np.atleast_1d(np.asarray(value, dtype=np.int64))
