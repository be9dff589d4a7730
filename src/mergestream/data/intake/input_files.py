"""Bytes from a client -> pictures. The bytes decide on the format, never a file name or content type."""

import hashlib
import io
import math
import warnings
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from mergestream.data.intake.dicom.decoder_pool import read_dicom
from mergestream.data.intake.limits import MEBIBYTE, Allowance, IntakeError, Limits
from mergestream.data.intake.pictures import Picture, picture_of
from mergestream.data.intake.shades import image_pixels, three_channels
from mergestream.runtime.errors import DataError

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
# Deflate's highest ratio: a PNG that claims more pixels than this allows does not contain them.
MOST_DEFLATED = 1032
# A camera writes about ten. libjpeg passes over the whole image for each, however short it is.
MOST_SCANS = 32
TILE_WIDTH, TILE_HEIGHT = 322, 323
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
    if data.startswith(NUMPY_MAGIC):
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
    hint = next((hint for magic, hint in HINTS.items() if data.startswith(magic)), f"Send {SUPPORTED}.")
    raise IntakeError("unsupported_format", f"The format of the bytes is not supported. {hint}")


def read_photograph(data: bytes, format_name: str, allowance: Allowance) -> np.ndarray:
    """Decode one image; `format_name` is Pillow's name of the format."""
    try:
        return _decode_photograph(data, format_name, allowance)
    except Image.DecompressionBombError:
        raise IntakeError("too_large", "The image has more pixels than the service decodes.") from None
    except IntakeError:
        raise
    except MemoryError:
        raise IntakeError("too_large", "The image needs more memory than the service has.") from None
    except DataError:
        raise IntakeError("damaged", "The image holds numbers that are not finite.") from None
    except Exception:  # a decoder may raise anything on a damaged file, and quote it
        raise IntakeError("damaged", f"The {format_name} image is damaged or cut off.") from None


@cache
def _keep_pillow_silent() -> None:
    """Pillow warns of each strange number in a file; a client could fill the service's log."""
    warnings.filterwarnings("ignore", module=r"PIL(\.|$)")


def _decode_photograph(data: bytes, format_name: str, allowance: Allowance) -> np.ndarray:
    _keep_pillow_silent()
    if format_name == "WEBP":  # Pillow takes memory for it on opening
        allowance.require_pixels(*_webp_size(data))
    if format_name == "JPEG" and data.count(b"\xff\xda") > MOST_SCANS:
        raise IntakeError("too_large", f"A JPEG image may have {MOST_SCANS} scans; this one has more.")
    with Image.open(io.BytesIO(data), formats=[format_name]) as image:
        _require_single(image, format_name)
        allowance.require_pixels(image.height, image.width)
        if format_name == "PNG" and image.width * image.height // 8 > MOST_DEFLATED * len(data):
            raise ValueError
        if format_name == "TIFF":
            _require_small_tiles(image, allowance)
        allowance.take(1, image.height, image.width)
        return image_pixels(image)


def _require_single(image: Image.Image, format_name: str) -> None:
    """Refuse a file of several images. A camera's JPEG may carry a preview, which does not count."""
    if format_name == "JPEG":
        return
    try:
        image.seek(1)
    except EOFError:
        return
    raise IntakeError("unsupported_format", "The file holds several images. Send each as a file of its own.")


def _require_small_tiles(image: Any, allowance: Allowance) -> None:
    """Check the tile size: libtiff takes memory for a whole tile, which may be larger than the image."""
    width, height = (image.tag_v2.get(tag, 1) for tag in (TILE_WIDTH, TILE_HEIGHT))
    allowance.require_pixels(int(height), int(width))


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height from the first chunk: VP8X, VP8L or VP8."""
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise ValueError
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    raise ValueError


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
