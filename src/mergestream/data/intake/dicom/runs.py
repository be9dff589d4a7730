"""DICOM's run-length encoding (PS3.5 annex G), never decoded to more than the frame needs."""

import struct
from itertools import pairwise

from mergestream.data.intake.dicom.form import Form
from mergestream.data.intake.refusals import IntakeError

HEAD_BYTES, MOST_SEGMENTS = 64, 15


def decode_runs(frame: bytes, form: Form) -> bytes:
    """One frame as it stands in a file that is not compressed: low bytes first, one colour plane after the other."""
    width = form.bits_allocated // 8
    wanted, plane = form.samples_per_pixel * width, form.rows * form.columns
    if len(frame) < HEAD_BYTES:
        raise damaged_runs()
    count, *offsets = struct.unpack("<16L", frame[:HEAD_BYTES])
    if count != wanted or count > MOST_SEGMENTS:
        raise damaged_runs()
    bounds = [*offsets[:count], len(frame)]
    decoded = bytearray(plane * wanted)
    for number, (start, end) in enumerate(pairwise(bounds)):
        if not HEAD_BYTES <= start <= end <= len(frame):
            raise damaged_runs()
        sample, byte = divmod(number, width)  # the highest byte of each sample comes first
        first = sample * plane * width + width - 1 - byte
        decoded[first : first + plane * width - (width - 1 - byte) : width] = _segment(frame[start:end], plane)
    return bytes(decoded)


def _segment(packed: bytes, length: int) -> bytes:
    """PackBits: a count below 128 precedes that many bytes and one more, one above 128 a byte to repeat."""
    parts, size, position = list[bytes](), 0, 0
    while size < length:
        if position + 1 >= len(packed):
            raise damaged_runs()
        count = packed[position]
        if count < 128:
            part = packed[position + 1 : position + 2 + count]
            position += 2 + count
        elif count > 128:
            part = packed[position + 1 : position + 2] * (257 - count)
            position += 2
        else:
            position += 1
            continue
        parts.append(part)
        size += len(part)
    return b"".join(parts)[:length]


def damaged_runs() -> IntakeError:
    return IntakeError("damaged", "A run-length encoded frame of the DICOM file is damaged or of another size.")
