"""Bytes from a client -> pictures. The bytes decide on the format, never a file name or content type."""

import hashlib
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec

import numpy as np

from mergestream.data.intake.decoder_pool import EncodedFile, pool_for
from mergestream.data.intake.limits import MEBIBYTE, Allowance, IntakeError, Limits
from mergestream.data.intake.pictures import DicomSource, Picture, sha256_of_pixels
from mergestream.data.intake.shades import three_channels

PHOTOGRAPHS = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"BM": "BMP",
}
SUPPORTED = "PNG, JPEG, TIFF, BMP, WebP, DICOM or NumPy (.npy)"
# The first element of a DICOM data set: one of group 2 or 8.
BARE_DICOM = tuple(
    group + element for group in (b"\x02\0", b"\x08\0") for element in (b"\0\0", b"\1\0", b"\5\0", b"\x08\0")
)
# One message to the child process holds at most this much, unless it is one larger file.
BATCH_FILES, BATCH_BYTES = 32, 8 * MEBIBYTE
NUMPY_MAGIC = b"\x93NUMPY"
# NumPy itself writes 118 bytes, or a few more for a long shape.
MOST_HEADER_BYTES = 1024
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
LAYOUTS = "[H,W], [3,H,W], [H,W,3], [B,3,H,W] or [B,H,W,3] (1 for 3 where images are grey)"
HINTS = {
    b"PK\x03\x04": "Archives (zip, .npz) are not opened: send each image as a file of its own.",
    b"\x1f\x8b": "Compressed files (gzip) are not opened: send the image itself.",
    b"\x80\x04": "Pickles are never opened: write the array with numpy.save.",
    **dict.fromkeys(
        BARE_DICOM,
        "This looks like DICOM without its preamble ('DICM' at byte 128). Write it as a DICOM file (PS3.10).",
    ),
}


def read_upload(data: bytes, limits: Limits) -> list[Picture]:
    """Read the pictures of one file."""
    return _read([data], Allowance.of(limits))[0]


def read_uploads(files: Iterable[bytes], limits: Limits) -> list[Picture]:
    """Read all files of a request, in order, within one set of limits. An error carries the file's position."""
    allowance, pictures, first = Allowance.of(limits), list[Picture](), 0
    for batch in _batches(files, limits):
        try:
            pictures += [picture for own in _read(batch, allowance) for picture in own]
        except IntakeError as error:
            error.position = first + (error.position or 0)
            raise
        first += len(batch)
    if not pictures:
        raise IntakeError("empty", "The request holds no file.")
    return pictures


def read_each(files: Sequence[bytes], limits: Limits) -> list[list[Picture] | Exception]:
    """Read files of several requests: the pictures of each, or why it is refused. If none is, in one message."""
    with suppress(Exception):
        return [own for batch in _batches(files, limits) for own in _read(batch, Allowance.of(limits))]
    return [_pictures_or_refusal(data, limits) for data in files]


def _pictures_or_refusal(data: bytes, limits: Limits) -> list[Picture] | Exception:
    try:
        return read_uploads([data], limits)
    except Exception as refusal:
        return refusal


def _batches(files: Iterable[bytes], limits: Limits) -> Iterator[list[bytes]]:
    """Group small files for the child process, which decodes several per message; any other file stands alone."""
    batch, size = list[bytes](), 0
    for data in files:
        alone = not _encoded_kind(data) or len(data) > min(BATCH_BYTES, limits.file_bytes)
        if batch and (alone or len(batch) == BATCH_FILES or size + len(data) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        if alone:
            yield [data]
        else:
            batch, size = [*batch, data], size + len(data)
    if batch:
        yield batch


def _read(batch: Sequence[bytes], allowance: Allowance) -> list[list[Picture]]:
    """Read the pictures of each file: files that the child process decodes, or one other file."""
    data, limits = batch[0], allowance.limits
    if not data:
        raise IntakeError("empty", "The file is empty.")
    if len(data) > limits.file_bytes:
        mebibytes = limits.file_bytes / MEBIBYTE
        raise IntakeError("too_large", f"A file may have {mebibytes:,.1f} MiB; this one has more.")
    if data.startswith(NUMPY_MAGIC):
        return [_pictures(data, read_array(data, allowance))]
    files = [EncodedFile(_encoded_kind(each), each) for each in batch]
    if not files[0].kind:
        hint = next((hint for magic, hint in HINTS.items() if data.startswith(magic)), f"Send {SUPPORTED}.")
        raise IntakeError("unsupported_format", f"The format of the bytes is not supported. {hint}")
    if any(file.kind == "DICOM" for file in files) and find_spec("pydicom") is None:
        raise IntakeError("decoder_missing", "The service cannot read DICOM: pip install 'mergestream[serve]'.")
    decoded = pool_for(limits).decode(files, allowance)
    return [
        _pictures(file.data, map(three_channels, frames), DicomSource(*identifiers) if identifiers else None)
        for file, (identifiers, frames) in zip(files, decoded, strict=True)
    ]


def _pictures(data: bytes, images: Iterable[np.ndarray], source: DicomSource | None = None) -> list[Picture]:
    """The images [3,H,W] of one file; they are numbered if there are several."""
    sha256, pixels = hashlib.sha256(data).hexdigest(), list(images)
    numbers = range(1, len(pixels) + 1) if len(pixels) > 1 else (None,)
    return [Picture(p, sha256, sha256_of_pixels(p), number, source) for p, number in zip(pixels, numbers, strict=True)]


def _encoded_kind(data: bytes) -> str:
    """'DICOM', Pillow's name of the format, or '' for a file that needs no decoder or is not supported."""
    if data[128:132] == b"DICM":  # first: a preamble may look like the start of a TIFF file
        return "DICOM"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((name for magic, name in PHOTOGRAPHS.items() if data.startswith(magic)), "")


def read_array(data: bytes, allowance: Allowance) -> list[np.ndarray]:
    """Read the images of an array file."""
    shape, fortran, start = _array_header(data)
    images, height, width, channels_first = _array_layout(shape)
    if math.prod(shape) != len(data) - start:
        raise _damaged_array("its shape does not fit its number of bytes")
    allowance.take(images, height, width)
    array = np.frombuffer(data, np.uint8, offset=start).reshape(shape, order="F" if fortran else "C")
    if array.ndim == 2:
        array = array[..., None]
    batch = array[None] if array.ndim == 3 else array
    if channels_first:
        batch = batch.transpose(0, 2, 3, 1)
    return [three_channels(image) for image in batch]


def _array_header(data: bytes) -> tuple[tuple[int, ...], bool, int]:
    """Shape, whether columns come first, and where the numbers start."""
    file = io.BytesIO(data)
    try:
        read = HEADERS[np.lib.format.read_magic(file)]
        shape, fortran, dtype = read(file, max_header_size=MOST_HEADER_BYTES)
    except Exception:  # NumPy may raise anything on a hostile header, and quote it
        raise _damaged_array("its header is not that of an array of images") from None
    if dtype != np.uint8:
        raise IntakeError("wrong_type", "The array is not of type uint8. Send pixels from 0 to 255 as uint8.")
    if not all(0 <= length < 1 << 40 for length in shape):  # NumPy would fail on them with errors of its own
        raise _damaged_array("its shape is not that of images")
    return shape, fortran, file.tell()


def _array_layout(shape: tuple[int, ...]) -> tuple[int, int, int, bool]:
    """Number of images, height, width, and whether channels come first; if both orders fit, they do."""
    images, image = (shape[0], shape[1:]) if len(shape) == 4 else (1, shape)
    if 0 in shape:
        raise IntakeError("empty", "The array holds no pixels.")
    if len(image) == 2:
        return images, image[0], image[1], False
    if len(image) == 3 and image[0] in (1, 3):
        return images, image[1], image[2], True
    if len(image) == 3 and image[2] in (1, 3):
        return images, image[0], image[1], False
    raise IntakeError("wrong_shape", f"The array's shape is not that of images: {LAYOUTS}.")


def _damaged_array(why: str) -> IntakeError:
    return IntakeError("damaged", f"The array file cannot be read: {why}. Write it with numpy.save.")
