"""The frames of a DICOM file as stored values, decoded by pydicom."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
from pydicom.encaps import encapsulate, generate_frames
from pydicom.pixels import get_decoder
from pydicom.uid import UID

from mergestream.data.intake.dicom.codestream_size import require_size
from mergestream.data.intake.dicom.header import BIG_ENDIAN, EXPLICIT, IMPLICIT, DicomHeader
from mergestream.data.intake.dicom.pixel_format import PixelFormat
from mergestream.data.intake.refusals import IntakeError, damaged_dicom

NATIVE = (EXPLICIT, IMPLICIT, BIG_ENDIAN)
RUN_LENGTH = "1.2.840.10008.1.2.5"
# Endings of 1.2.840.10008.1.2.4 by what decodes them: the module, and the extra that installs it.
JPEG, JPEG_2000 = ("libjpeg", "jpeg-lossless"), ("openjpeg", "serve")
DECODERS = {
    **dict.fromkeys(("50", "51", "57", "70", "80", "81"), JPEG),
    **dict.fromkeys(("90", "91", "201", "202", "203"), JPEG_2000),
}


class Frame(NamedTuple):
    """Values [H,W], or [H,W,3] in the colour space named by `colour`."""

    values: np.ndarray
    colour: str


def decode_frames(header: DicomHeader, form: PixelFormat) -> Iterator[Frame]:
    """Decode one frame after the other; none is kept here."""
    if header.transfer_syntax in NATIVE:
        yield from _native_frames(header, form)
        return
    plugin = "pydicom" if header.transfer_syntax == RUN_LENGTH else "pylibjpeg"
    decoder = None if header.transfer_syntax == RUN_LENGTH else _require_decoder(header.transfer_syntax)
    for frame in _encapsulated_frames(header, form):
        if decoder:
            require_size(frame, form, jpeg2000=decoder is JPEG_2000)
        elif len(frame) > form.most_run_length_bytes:  # it would be unpacked to the end, far beyond the frame
            raise damaged_dicom()
        array, properties = get_decoder(header.transfer_syntax).as_array(
            encapsulate([frame]), index=0, decoding_plugin=plugin, **form.decoder_options(), number_of_frames=1
        )
        yield Frame(array, str(properties["photometric_interpretation"]))


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
        yield Frame(array, str(properties["photometric_interpretation"]))


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
    decoder = module, extra = DECODERS[ending]
    if find_spec("pylibjpeg") is None or find_spec(module) is None:
        raise IntakeError(
            "decoder_missing", f"{UID(transfer_syntax).name} needs a decoder: pip install 'mergestream[{extra}]'."
        )
    return decoder
