"""The size that a JPEG, JPEG-LS or JPEG 2000 stream announces: a decoder takes memory for it before it decodes."""

import struct

from mergestream.data.intake.dicom.pixel_format import PixelFormat
from mergestream.data.intake.refusals import IntakeError

START_OF_FRAME = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}
START_OF_SCAN, END_OF_IMAGE, FILL = 0xDA, 0xD9, 0xFF
WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD8)}
# Hierarchical images, and sizes that come later: nobody sends them, and they would evade the check.
EVASIVE = {0xDE, 0xDF, 0xDC}
JPEG_2000_START, MOST_TILES = b"\xff\x4f\xff\x51", 65_535  # ISO/IEC 15444-1

Size = tuple[int, int, int, int]  # height, width, components, bits


def require_size(frame: bytes, form: PixelFormat, jpeg2000: bool) -> None:
    """Refuse a stream whose own size differs from that of its DICOM header."""
    try:
        *size, bits = _jpeg2000_size(frame) if jpeg2000 else _jpeg_size(frame)
    except (ValueError, IndexError, struct.error):
        size, bits = [], 0
    if size != [form.rows, form.columns, form.samples_per_pixel] or not 1 <= bits <= form.bits_allocated:
        raise IntakeError("damaged", "A compressed frame of the DICOM file is not of the size that its header says.")


def _jpeg_size(frame: bytes) -> Size:
    """From the only start-of-frame segment before the first scan."""
    sizes, position = list[Size](), 2
    while frame[:2] == b"\xff\xd8" and frame[position] == 0xFF and frame[position + 1] not in EVASIVE:
        marker = frame[position + 1]
        if marker in (START_OF_SCAN, END_OF_IMAGE):
            (size,) = sizes
            return size
        if marker in START_OF_FRAME:
            bits, height, width, components = struct.unpack_from(">BHHB", frame, position + 4)
            sizes.append((height, width, components, bits))
        if marker == FILL:
            position += 1
        else:
            position += 2 if marker in WITHOUT_LENGTH else 2 + int.from_bytes(frame[position + 2 : position + 4])
    raise ValueError


def _jpeg2000_size(frame: bytes) -> Size:
    """From the SIZ segment at the start; a JP2 file has boxes before it."""
    start = 0 if frame.startswith(JPEG_2000_START) else frame.index(b"jp2c" + JPEG_2000_START) + 4
    # After length and capabilities: image, its offset, tile, its offset.
    x, y, x_offset, y_offset, tile_x, tile_y, _, _, components, depth = struct.unpack_from(">8LHB", frame, start + 8)
    if not tile_x or not tile_y or -(-x // tile_x) * -(-y // tile_y) > MOST_TILES:
        raise ValueError
    return y - y_offset, x - x_offset, components, (depth & 0x7F) + 1
