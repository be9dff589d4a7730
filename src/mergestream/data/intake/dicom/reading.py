"""A DICOM file -> pictures, one a frame. What a patient's record says beside pixels is never read."""

import hashlib

import numpy as np

from mergestream.data.intake.dicom.colour import show_palette, show_rgb
from mergestream.data.intake.dicom.elements import damaged
from mergestream.data.intake.dicom.form import GREY, Form, form_of
from mergestream.data.intake.dicom.frames import Frame, frames
from mergestream.data.intake.dicom.grey import show_grey
from mergestream.data.intake.dicom.header import Header, read_header
from mergestream.data.intake.limits import Allowance
from mergestream.data.intake.pictures import Picture, picture_of
from mergestream.data.intake.refusals import IntakeError
from mergestream.data.intake.shades import three_channels
from mergestream.runtime.errors import WorkerError


def read_dicom(data: bytes, allowance: Allowance) -> list[Picture]:
    """The pictures of a file that has its preamble."""
    try:
        return _pictures(data, allowance)
    except (IntakeError, WorkerError):
        raise
    except MemoryError:
        raise IntakeError("too_large", "The DICOM image needs more memory than the service has.") from None
    except Exception:  # pydicom and NumPy may raise anything on contradicting headers, and quote them
        raise damaged() from None


def _pictures(data: bytes, allowance: Allowance) -> list[Picture]:
    header = read_header(data, allowance.limits)
    form = form_of(header.dataset, allowance)
    sha256, source = hashlib.sha256(data).hexdigest(), header.source()
    pictures = []
    for number, frame in enumerate(frames(header, form, allowance)):
        if frame.values.shape[:2] != (form.rows, form.columns):
            raise damaged()
        pixels = three_channels(_shown(frame, header, form, number)).numpy()
        pictures.append(picture_of(pixels, sha256, number + 1 if form.number_of_frames > 1 else None, source))
    return pictures


def _shown(frame: Frame, header: Header, form: Form, number: int) -> np.ndarray:
    if form.photometric_interpretation in GREY:
        return show_grey(frame.values, header.dataset, form, number, little=header.little)
    if form.photometric_interpretation == "PALETTE COLOR":
        return show_palette(frame.values, header.dataset, form, little=header.little)
    return show_rgb(frame.values, form, frame.colour)
