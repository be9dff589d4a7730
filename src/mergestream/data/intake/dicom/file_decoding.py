"""A DICOM file -> uint8 frames as a radiologist sees them. Runs in the decoding process."""

from collections.abc import Iterator

import numpy as np

from mergestream.data.intake.dicom.colour import show_palette, show_rgb
from mergestream.data.intake.dicom.frames import Frame, decode_frames
from mergestream.data.intake.dicom.grey import show_grey
from mergestream.data.intake.dicom.header import DicomHeader, read_header
from mergestream.data.intake.dicom.pixel_format import GREY, PixelFormat, read_pixel_format
from mergestream.data.intake.limits import Allowance
from mergestream.data.intake.refusals import damaged_dicom


def decode_file(data: bytes, allowance: Allowance) -> tuple[list[str], Iterator[np.ndarray]]:
    """The object's UIDs, and its frames uint8 [H,W] or [H,W,3], decoded while they are iterated over."""
    header = read_header(data, allowance.limits)
    form = read_pixel_format(header.dataset, allowance)
    return header.identifiers(), _shown_frames(header, form)


def _shown_frames(header: DicomHeader, form: PixelFormat) -> Iterator[np.ndarray]:
    for number, frame in enumerate(decode_frames(header, form)):
        if frame.values.shape[:2] != (form.rows, form.columns):
            raise damaged_dicom()
        yield _shown(frame, header, form, number)


def _shown(frame: Frame, header: DicomHeader, form: PixelFormat, number: int) -> np.ndarray:
    if form.photometric_interpretation in GREY:
        return show_grey(frame.values, header.dataset, form, number, little_endian=header.little_endian)
    if form.photometric_interpretation == "PALETTE COLOR":
        return show_palette(frame.values, header.dataset, form, little_endian=header.little_endian)
    return show_rgb(frame.values, form, frame.colour)
