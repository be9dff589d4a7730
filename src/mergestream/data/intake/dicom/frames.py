"""The frames of a DICOM file as numbers: stored plainly, run-length encoded or as JPEG of any kind."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
from pydicom.encaps import generate_frames
from pydicom.pixels import get_decoder

from mergestream.data.intake.dicom.codestreams import require_size
from mergestream.data.intake.dicom.elements import damaged
from mergestream.data.intake.dicom.form import Form
from mergestream.data.intake.dicom.header import BIG_ENDIAN, EXPLICIT, IMPLICIT, Header
from mergestream.data.intake.dicom.isolation import decoders
from mergestream.data.intake.dicom.runs import decode_runs
from mergestream.data.intake.limits import Allowance
from mergestream.data.intake.refusals import IntakeError

PLAIN = (EXPLICIT, IMPLICIT, BIG_ENDIAN)
RUN_LENGTH = "1.2.840.10008.1.2.5"
JPEG, JPEG_2000 = ("libjpeg", "jpeg-lossless"), ("openjpeg", "serve")  # module, and the extra that brings it
# Endings of 1.2.840.10008.1.2.4: the name of a compression, and what decodes it.
COMPRESSIONS = {
    "50": ("JPEG Baseline", JPEG),
    "51": ("JPEG Extended", JPEG),
    "57": ("JPEG Lossless", JPEG),
    "70": ("JPEG Lossless", JPEG),
    "80": ("JPEG-LS", JPEG),
    "81": ("JPEG-LS", JPEG),
    "90": ("JPEG 2000", JPEG_2000),
    "91": ("JPEG 2000", JPEG_2000),
    "201": ("High-Throughput JPEG 2000", JPEG_2000),
    "202": ("High-Throughput JPEG 2000", JPEG_2000),
    "203": ("High-Throughput JPEG 2000", JPEG_2000),
}


class Frame(NamedTuple):
    """Numbers [H,W], or [H,W,3] in RGB."""

    values: np.ndarray
    colour: str


def frames(header: Header, form: Form, allowance: Allowance) -> Iterator[Frame]:
    """Decode frame after frame; none is kept here."""
    if header.transfer_syntax in PLAIN:
        yield from _plain_frames(header, form, allowance)
    elif header.transfer_syntax == RUN_LENGTH:
        for frame in _encapsulated(header, form, allowance):
            yield _plain(decode_runs(frame, form), form, EXPLICIT, planar=1)
    else:
        jpeg2000 = _require_decoder(header.transfer_syntax) is JPEG_2000
        options = {"transfer_syntax": header.transfer_syntax, **form.decoder_options()}
        for frame in _encapsulated(header, form, allowance):
            require_size(frame, form, jpeg2000)
            yield Frame(*decoders(allowance.limits.pixels).decode(options, frame, allowance))


def _plain_frames(header: Header, form: Form, allowance: Allowance) -> Iterator[Frame]:
    length, count, pixels = form.frame_bytes, form.number_of_frames, header.pixels
    surplus = len(pixels) - length * count
    # Padding is common. A whole frame more, or the bytes of full colour, says that the header is wrong.
    if header.encapsulated or surplus < 0 or surplus >= max(length // 2, 2):
        raise damaged()
    if not header.little and header.pixel_vr == "OW" and form.bits_allocated == 8:
        # Bytes in words of two, which a frame of odd length would tear apart.
        pixels = memoryview(np.frombuffer(pixels[: len(pixels) // 2 * 2], ">u2").astype("<u2").tobytes())
    for number in range(count):
        allowance.seconds_left()
        frame = bytes(pixels[number * length : (number + 1) * length])
        yield _plain(frame, form, header.transfer_syntax, form.planar_configuration)


def _plain(frame: bytes, form: Form, transfer_syntax: str, planar: int) -> Frame:
    padded = frame + b"\0" * (len(frame) % 2)
    options = {**form.decoder_options(), "planar_configuration": planar, "pixel_keyword": "PixelData"}
    array, properties = get_decoder(transfer_syntax).as_array(padded, **options)
    return Frame(array, str(properties["photometric_interpretation"]))


def _encapsulated(header: Header, form: Form, allowance: Allowance) -> Iterator[bytes]:
    """The compressed frames, put together from their fragments; exactly as many as the header says."""
    if not header.encapsulated:
        raise damaged()
    table = header.dataset.get("ExtendedOffsetTable"), header.dataset.get("ExtendedOffsetTableLengths")
    given = generate_frames(
        bytes(header.pixels),
        number_of_frames=form.number_of_frames,
        extended_offsets=table if all(isinstance(part, bytes) and part for part in table) else None,
    )
    found = 0
    for found, frame in enumerate(given, start=1):
        allowance.seconds_left()
        if found > form.number_of_frames:
            raise damaged()
        yield frame
    if found < form.number_of_frames:
        raise damaged()


def _require_decoder(transfer_syntax: str) -> tuple[str, str]:
    prefix, _, ending = transfer_syntax.rpartition(".")
    if prefix != "1.2.840.10008.1.2.4" or ending not in COMPRESSIONS:
        raise IntakeError("unsupported_format", "The DICOM file's transfer syntax is not read here (docs/dicom.md).")
    name, decoder = COMPRESSIONS[ending]
    module, extra = decoder
    if find_spec("pylibjpeg") is None or find_spec(module) is None:
        raise IntakeError(
            "decoder_missing", f"{name} needs a decoder that is not here: pip install 'mergestream[{extra}]'."
        )
    return decoder
