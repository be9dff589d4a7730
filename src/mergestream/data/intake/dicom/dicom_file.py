"""A DICOM file -> pictures, one per frame. The file is parsed and decoded in a child process."""

import hashlib
from importlib.util import find_spec

from mergestream.data.intake.dicom.process_pool import decoder_pool
from mergestream.data.intake.limits import Allowance
from mergestream.data.intake.pictures import DicomSource, Picture, picture_of
from mergestream.data.intake.refusals import IntakeError
from mergestream.data.intake.shades import three_channels


def read_dicom(data: bytes, allowance: Allowance) -> list[Picture]:
    """Decode a file that has its preamble."""
    if find_spec("pydicom") is None:
        raise IntakeError("decoder_missing", "The service cannot read DICOM: pip install 'mergestream[serve]'.")
    identifiers, frames = decoder_pool(allowance.limits).decode(data, allowance)
    allowance.take(len(frames), *frames[0].shape[:2])
    sha256, source = hashlib.sha256(data).hexdigest(), DicomSource(*identifiers)
    return [
        picture_of(three_channels(frame), sha256, number if len(frames) > 1 else None, source)
        for number, frame in enumerate(frames, start=1)
    ]
