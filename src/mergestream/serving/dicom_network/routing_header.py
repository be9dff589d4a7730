"""The few elements of a received data set that routing needs, read without decoding anything else.

The values of other elements, such as names of patients, are skipped. Time and memory are bounded by the window and by
the number of elements.
"""

import struct
import zlib
from dataclasses import dataclass

from mergestream.data.intake.limits import IntakeError, damaged_dicom

WINDOW = 1 << 20  # bytes of a data set that are looked at
MOST_ELEMENTS = 20_000
MOST_DEPTH = 16
IMPLICIT, BIG_ENDIAN, DEFLATED = "1.2.840.10008.1.2", "1.2.840.10008.1.2.2", "1.2.840.10008.1.2.1.99"
SOP_CLASS, SOP_INSTANCE, MODALITY = 0x00080016, 0x00080018, 0x00080060
BODY_PART, VIEW, STUDY, SERIES_UID = 0x00180015, 0x00185101, 0x0020000D, 0x0020000E
NEEDED = (SOP_CLASS, SOP_INSTANCE, MODALITY, BODY_PART, VIEW, STUDY, SERIES_UID)
PIXELS = (0x7FE00008, 0x7FE00009, 0x7FE00010)
UNDEFINED = 0xFFFFFFFF
ITEM, ITEM_END, SEQUENCE_END = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
# Value representations with a length of 32 bits.
LONG = frozenset((b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"))


@dataclass(frozen=True, repr=False)
class RoutingHeader:
    """Values for routing. UIDs identify a patient, so they are never logged."""

    calling: str
    sop_class: str
    sop_instance: str
    modality: str
    body_part: str
    view: str
    study: str
    series: str

    def __repr__(self) -> str:
        return "RoutingHeader(withheld)"


def read_routing_header(start: bytes, size: int, transfer_syntax: str, calling: str) -> RoutingHeader:
    """Read the header of a data set of `size` bytes that begins with `start`, its first `WINDOW` bytes at most.

    IntakeError: it is damaged, cut off, or lacks an identifier.
    """
    if transfer_syntax == DEFLATED:
        try:
            start = zlib.decompressobj(-zlib.MAX_WBITS).decompress(start, WINDOW)
        except zlib.error:
            raise damaged_dicom() from None
        size = 1 << 40  # unknown
    try:
        values = _Walk(start, size, transfer_syntax).needed_values()
    except (struct.error, UnicodeDecodeError):
        if size <= len(start):
            raise damaged_dicom() from None
        raise IntakeError("too_large", "The header of the DICOM object is larger than this node reads.") from None
    texts = [values.get(tag, "") for tag in NEEDED]
    header = RoutingHeader(calling, *texts)
    if not all((header.sop_class, header.sop_instance, header.study, header.series)):
        raise IntakeError("damaged", "The DICOM object lacks one of the UIDs of class, instance, study and series.")
    return header


class _Walk:
    """One pass over the elements of a data set."""

    def __init__(self, data: bytes, size: int, transfer_syntax: str) -> None:
        self._data, self._size = data, size
        order = ">" if transfer_syntax == BIG_ENDIAN else "<"
        self._implicit = transfer_syntax == IMPLICIT
        self._head, self._long = struct.Struct(order + "HH2sH"), struct.Struct(order + "I")
        self._elements = 0

    def needed_values(self) -> dict[int, str]:
        """Values by tag. Elements after those needed are checked to fit into the data set, up to the pixels."""
        values: dict[int, str] = {}
        position, size, last = 0, self._size, 0
        while position < size:
            if position >= len(self._data) and last > SERIES_UID:  # the rest is beyond the window
                return values
            tag, length, position = self._element(position)
            if tag in PIXELS:
                self._require_room(position, length)
                return values
            if length == UNDEFINED:
                position = self._after_sequence(position, 1)
            else:
                self._require_room(position, length)
                if tag in NEEDED:
                    values[tag] = self._text(position, length)
                position += length
            last = tag
        return values

    def _element(self, position: int) -> tuple[int, int, int]:
        """Tag, length of the value, and where the value begins."""
        self._elements += 1
        if self._elements > MOST_ELEMENTS:
            raise IntakeError("too_large", "The DICOM header has more elements than the node allows.")
        group, element, kind, length = self._head.unpack_from(self._data, position)
        tag = group << 16 | element
        if self._implicit or group == 0xFFFE:
            return tag, self._long.unpack_from(self._data, position + 4)[0], position + 8
        if kind in LONG:
            return tag, self._long.unpack_from(self._data, position + 8)[0], position + 12
        return tag, length, position + 8

    def _after_sequence(self, position: int, depth: int) -> int:
        """Where a sequence or item of undefined length ends."""
        if depth > MOST_DEPTH:
            raise damaged_dicom()
        while True:
            tag, length, position = self._element(position)
            if tag in (ITEM_END, SEQUENCE_END):
                return position
            if length == UNDEFINED:
                position = self._after_sequence(position, depth + 1)
            else:
                self._require_room(position, length)
                position += length

    def _require_room(self, position: int, length: int) -> None:
        if length != UNDEFINED and position + length > self._size:
            raise damaged_dicom()

    def _text(self, position: int, length: int) -> str:
        if length > 64 * 4:
            raise damaged_dicom()
        value = self._data[position : position + length]
        if len(value) < length:
            raise struct.error
        return value.decode("ascii").strip(" \0")
