"""What a JPEG, JPEG-LS or JPEG 2000 stream says of its size: a decoder takes that much memory before it decodes."""

from typing import NamedTuple

from mergestream.data.intake.dicom.pixel_format import PixelFormat
from mergestream.data.intake.refusals import IntakeError

START_OF_FRAME = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}
START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9
ALONE = {0x01, *range(0xD0, 0xD8)}  # markers without a length
# Hierarchical images, and sizes that come later: nobody sends them, and they would evade the check.
EVASIVE = {0xDE, 0xDF, 0xDC}
MOST_TILES = 65_535  # ISO/IEC 15444-1


class Size(NamedTuple):
    height: int
    width: int
    components: int
    precision: int


def require_size(frame: bytes, form: PixelFormat, jpeg2000: bool) -> None:
    """Refuse a stream whose own size is not that of its DICOM header."""
    size = _jpeg2000_size(frame) if jpeg2000 else _jpeg_size(frame)
    if size is None or size[:3] != (form.rows, form.columns, form.samples_per_pixel):
        raise mismatch()
    if not 1 <= size.precision <= form.bits_allocated:
        raise mismatch()


def mismatch() -> IntakeError:
    return IntakeError("damaged", "A compressed frame of the DICOM file is not of the size that its header says.")


def _jpeg_size(frame: bytes) -> Size | None:
    """From the only start-of-frame segment before the first scan."""
    size, position = None, 2
    if frame[:2] != b"\xff\xd8":
        return None
    while position + 4 <= len(frame):
        if frame[position] != 0xFF:
            return None
        marker = frame[position + 1]
        if marker == 0xFF:  # fill
            position += 1
            continue
        if marker in (START_OF_SCAN, END_OF_IMAGE):
            return size
        if marker in EVASIVE or (marker in START_OF_FRAME and size):
            return None
        if marker in START_OF_FRAME:
            precision, height, width, components = _numbers(frame, position + 4, 1, 2, 2, 1)
            size = Size(height, width, components, precision)
        position += 2 if marker in ALONE else 2 + int.from_bytes(frame[position + 2 : position + 4])
    return None


def _jpeg2000_size(frame: bytes) -> Size | None:
    """From the SIZ segment, which stands first; a wrapping JP2 file's boxes are stepped over."""
    start = _codestream_start(frame)
    if frame[start : start + 4] != b"\xff\x4f\xff\x51" or len(frame) < start + 43:
        return None
    # Length and capabilities (2 bytes each), then eight sizes: image, its offset, tile, its offset.
    x, y, x_offset, y_offset, tile_x, tile_y, _, _ = _numbers(frame, start + 8, *(4,) * 8)
    components, depth = _numbers(frame, start + 40, 2, 1)
    height, width = y - y_offset, x - x_offset
    if not tile_x or not tile_y or -(-x // tile_x) * -(-y // tile_y) > MOST_TILES:
        return None
    return Size(height, width, components, (depth & 0x7F) + 1)


def _codestream_start(frame: bytes) -> int:
    if frame[4:8] != b"jP  ":
        return 0
    position = 12
    while frame[position + 4 : position + 8] != b"jp2c":
        length = int.from_bytes(frame[position : position + 4])
        if length < 8 or position > len(frame):
            return len(frame)
        position += length
    return position + 8


def _numbers(frame: bytes, position: int, *sizes: int) -> list[int]:
    """Unsigned numbers that follow each other, high bytes first; what is cut off reads as 0."""
    numbers = []
    for size in sizes:
        numbers.append(int.from_bytes(frame[position : position + size]))
        position += size
    return numbers
