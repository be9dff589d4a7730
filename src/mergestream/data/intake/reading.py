"""Bytes from a client -> pictures. The bytes decide on the format, never a file name or content type."""

import hashlib
from collections.abc import Iterable

from mergestream.data.intake.dicom.dicom_file import read_dicom
from mergestream.data.intake.limits import MEBIBYTE, Allowance, Limits
from mergestream.data.intake.numpy_files import MAGIC as NUMPY
from mergestream.data.intake.numpy_files import read_array
from mergestream.data.intake.photographs import read_photograph
from mergestream.data.intake.pictures import Picture, picture_of
from mergestream.data.intake.refusals import IntakeError

PHOTOGRAPHS = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"BM": "BMP",
}
KNOWN = "PNG, JPEG, TIFF, BMP, WebP, DICOM or NumPy (.npy)"
# The first element of a DICOM data set: one of group 2 or 8.
BARE_DICOM = tuple(
    group + element for group in (b"\x02\0", b"\x08\0") for element in (b"\0\0", b"\1\0", b"\5\0", b"\x08\0")
)
HINTS = {
    b"PK\x03\x04": "Archives (zip, .npz) are not opened: send each image as a file of its own.",
    b"\x1f\x8b": "Compressed files (gzip) are not opened: send the image itself.",
    b"\x80\x04": "Pickles are never opened: write the array with numpy.save.",
    **dict.fromkeys(
        BARE_DICOM,
        "This looks like DICOM without its preamble ('DICM' at byte 128). Write it as a DICOM file (PS3.10).",
    ),
}


def read_upload(data: bytes, limits: Limits, allowance: Allowance | None = None) -> list[Picture]:
    """Read the pictures of one file. `allowance` is what is left of its request's limits."""
    allowance = allowance or Allowance(limits)
    allowance.next_file()
    if not data:
        raise IntakeError("empty", "The file is empty.")
    if len(data) > limits.file_bytes:
        mebibytes = limits.file_bytes / MEBIBYTE
        raise IntakeError("too_large", f"A file may have {mebibytes:,.1f} MiB; this one has more.")
    if data[128:132] == b"DICM":  # first: a preamble may look like the start of a TIFF file
        return read_dicom(data, allowance)
    sha256 = hashlib.sha256(data).hexdigest()
    if data.startswith(NUMPY):
        arrays = read_array(data, allowance)
        return [picture_of(pixels, sha256, n if len(arrays) > 1 else None) for n, pixels in enumerate(arrays, start=1)]
    return [picture_of(read_photograph(data, _photograph_format(data), allowance), sha256)]


def read_uploads(files: Iterable[bytes], limits: Limits) -> list[Picture]:
    """Read all files of a request, in order, within one set of limits. An error carries the file's position."""
    allowance, pictures = Allowance(limits), list[Picture]()
    for position, data in enumerate(files):
        try:
            pictures += read_upload(data, limits, allowance)
        except IntakeError as error:
            error.position = position
            raise
    if not pictures:
        raise IntakeError("empty", "The request holds no file.")
    return pictures


def _photograph_format(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    for magic, name in PHOTOGRAPHS.items():
        if data.startswith(magic):
            return name
    hint = next((hint for magic, hint in HINTS.items() if data.startswith(magic)), f"Send {KNOWN}.")
    raise IntakeError("unsupported_format", f"The format of the bytes is not supported. {hint}")
