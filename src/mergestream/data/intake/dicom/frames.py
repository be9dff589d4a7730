"""The frames of a DICOM file as stored values, decoded by pydicom."""

import struct
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from pydicom.encaps import encapsulate, generate_frames
from pydicom.pixels import get_decoder
from pydicom.uid import UID

from mergestream.data.intake.dicom import gdcm_plugin
from mergestream.data.intake.dicom.header import BIG_ENDIAN, EXPLICIT, IMPLICIT, DicomHeader, PixelFormat
from mergestream.data.intake.limits import IntakeError, damaged_dicom

NATIVE = (EXPLICIT, IMPLICIT, BIG_ENDIAN)
RUN_LENGTH = "1.2.840.10008.1.2.5"
# Endings of 1.2.840.10008.1.2.4 by what decodes them: pydicom's plugin, and the module that it needs.
JPEG, JPEG_EXTENDED = ("gdcm", "gdcm"), (gdcm_plugin.LABEL, "gdcm")
JPEG_2000 = ("pylibjpeg", "openjpeg")
DECODERS = {
    **dict.fromkeys(("50", "57", "70", "80", "81"), JPEG),
    "51": JPEG_EXTENDED,
    **dict.fromkeys(("90", "91", "201", "202", "203"), JPEG_2000),
}
Frame = tuple[np.ndarray, str]  # values [H,W], or [H,W,3] in the colour space of this name


def decode_frames(header: DicomHeader, form: PixelFormat) -> Iterator[Frame]:
    """Decode one frame after the other; none is kept here."""
    if header.transfer_syntax in NATIVE:
        yield from _native_frames(header, form)
        return
    decoder = None if header.transfer_syntax == RUN_LENGTH else _require_decoder(header.transfer_syntax)
    plugin = decoder[0] if decoder else "pydicom"
    # More than any encoder needs for a frame: its header, and two bytes per byte.
    most_run_length_bytes = 64 + 2 * form.frame_bytes + 2 * form.samples_per_pixel * form.bits_allocated
    for frame in _encapsulated_frames(header, form):
        if decoder:
            require_size(frame, form, jpeg2000=decoder is JPEG_2000)
        elif len(frame) > most_run_length_bytes:  # it would be unpacked to the end, far beyond the frame
            raise damaged_dicom()
        array, properties = _decoder_of(header.transfer_syntax).as_array(
            encapsulate([frame]), index=0, decoding_plugin=plugin, **form.decoder_options(), number_of_frames=1
        )
        yield array, str(properties["photometric_interpretation"])


def _native_frames(header: DicomHeader, form: PixelFormat) -> Iterator[Frame]:
    surplus = len(header.pixels) - form.frame_bytes * form.number_of_frames
    # Padding is common. A whole frame more, or the bytes of full colour, means that the header is wrong.
    if header.encapsulated or surplus < 0 or surplus >= max(form.frame_bytes // 2, 2):
        raise damaged_dicom()
    for array, properties in get_decoder(header.transfer_syntax).iter_array(
        header.pixels + b"\0" * (len(header.pixels) % 2),
        pixel_keyword="PixelData",
        pixel_vr=header.pixel_vr,
        number_of_frames=form.number_of_frames,
        allow_excess_frames=False,
        **form.decoder_options(),
    ):
        yield array, str(properties["photometric_interpretation"])


def _encapsulated_frames(header: DicomHeader, form: PixelFormat) -> Iterator[bytes]:
    """The compressed frames, joined from their fragments; exactly as many as the header says."""
    if not header.encapsulated:
        raise damaged_dicom()
    table = header.dataset.get("ExtendedOffsetTable"), header.dataset.get("ExtendedOffsetTableLengths")
    frames = generate_frames(
        header.pixels,
        number_of_frames=form.number_of_frames,
        extended_offsets=table if all(isinstance(part, bytes) and part for part in table) else None,
    )
    count = 0
    for count, frame in enumerate(frames, start=1):
        if count > form.number_of_frames:
            raise damaged_dicom()
        yield frame
    if count < form.number_of_frames:
        raise damaged_dicom()


def _require_decoder(transfer_syntax: str) -> tuple[str, str]:
    prefix, _, ending = transfer_syntax.rpartition(".")
    if prefix != "1.2.840.10008.1.2.4" or ending not in DECODERS:
        raise IntakeError("unsupported_format", "The DICOM file's transfer syntax is not supported (docs/dicom.md).")
    decoder = plugin, module = DECODERS[ending]
    if find_spec(module) is None or (plugin == "pylibjpeg" and find_spec(plugin) is None):
        raise IntakeError(
            "decoder_missing", f"{UID(transfer_syntax).name} needs a decoder: pip install 'mergestream[serve]'."
        )
    return decoder


@cache  # a plugin is added once
def _decoder_of(transfer_syntax: str) -> Any:
    """pydicom's decoder, for JPEG Extended with our plugin."""
    decoder = get_decoder(transfer_syntax)
    if DECODERS.get(transfer_syntax.rpartition(".")[2]) is JPEG_EXTENDED:
        decoder.add_plugin(gdcm_plugin.LABEL, (gdcm_plugin.__name__, "decode_frame"))
    return decoder


START_OF_FRAME = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}
START_OF_SCAN, END_OF_IMAGE, FILL = 0xDA, 0xD9, 0xFF
WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD8)}
# Hierarchical images, and sizes that come later: rare, and they would evade the check.
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
