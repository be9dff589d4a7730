"""Where the elements of a DICOM data set lie (PS3.5 section 7), found without reading what they hold.

A reader of whole data sets makes an object of every element and item, a thousand bytes for eight of the file's, and
follows sequences by recursion. Here nothing is made but positions, and patients' names are stepped over unread.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from mergestream.data.intake.refusals import IntakeError

UNDEFINED = 0xFFFFFFFF
ITEM, ITEM_END, SEQUENCE_END = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
LONG_LENGTH = (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV")


class Syntax(NamedTuple):
    """How elements are written: with their type (explicit) or without, low bytes first (little) or last."""

    explicit: bool
    little: bool


IMPLICIT = Syntax(explicit=False, little=True)


class Element(NamedTuple):
    """One element: its head is at `start`, its value from `value` to `end`; the next one starts at `stop`."""

    tag: int
    vr: bytes
    start: int
    value: int
    end: int
    stop: int
    undefined: bool  # of undefined length: made of items, up to a delimiter


def damaged() -> IntakeError:
    return IntakeError("damaged", "The DICOM file is damaged or cut off: its elements do not fit together.")


class Walk:
    """Steps over a data set; at most `most` elements and items, nested ones included."""

    def __init__(self, data: memoryview, most: int) -> None:
        self._data, self._left = data, most

    def elements(self, position: int, syntax: Syntax) -> Iterator[Element]:
        """The elements of the outermost level."""
        while position < len(self._data):
            tag, vr, length, value = self._head(position, syntax)
            if length == UNDEFINED:
                end, stop = self._end_of_items(value, _inside(vr, syntax))
            else:
                end = stop = value + length
            if stop > len(self._data):
                raise damaged()
            yield Element(tag, vr, position, value, end, stop, length == UNDEFINED)
            position = stop

    def _end_of_items(self, position: int, syntax: Syntax) -> tuple[int, int]:
        """Where a value of undefined length ends, and where its delimiter does."""
        # What is open at this place: items of a sequence, or (as a syntax) the data set of an item.
        open_items: list[tuple[bool, Syntax]] = [(True, syntax)]
        while True:
            among_items, syntax = open_items[-1]
            tag, vr, length, value = self._head(position, syntax, bare=among_items)
            if tag == (SEQUENCE_END if among_items else ITEM_END):
                open_items.pop()
                if not open_items:
                    return position, value
                position = value
            elif among_items and tag != ITEM:
                raise damaged()
            elif length == UNDEFINED:
                open_items.append((not among_items, syntax if among_items else _inside(vr, syntax)))
                position = value
            else:
                position = value + length

    def _head(self, position: int, syntax: Syntax, bare: bool = False) -> tuple[int, bytes, int, int]:
        """Tag, type, length and the place of the value. Items and delimiters are bare: they have no type."""
        self._left -= 1
        if self._left < 0:
            raise IntakeError("too_large", "The DICOM header has more elements than the service reads.")
        head = bytes(self._data[position : position + 12])
        order: Literal["little", "big"] = "little" if syntax.little else "big"
        if len(head) < 8:
            raise damaged()
        tag = int.from_bytes(head[:2], order) << 16 | int.from_bytes(head[2:4], order)
        if bare or not syntax.explicit or tag >> 16 == 0xFFFE:
            return tag, b"", int.from_bytes(head[4:8], order), position + 8
        vr = head[4:6]
        if not b"AA" <= vr <= b"ZZ":  # some writers leave the type out here and there; pydicom reads on in this way too
            return tag, b"", int.from_bytes(head[4:8], order), position + 8
        if vr in LONG_LENGTH:
            if len(head) < 12:
                raise damaged()
            return tag, vr, int.from_bytes(head[8:12], order), position + 12
        return tag, vr, int.from_bytes(head[6:8], order), position + 8


def _inside(vr: bytes, syntax: Syntax) -> Syntax:
    """Items of a sequence whose type got lost on the way (UN) are written without types (PS3.5 section 6.2.2)."""
    return IMPLICIT if vr == b"UN" else syntax
