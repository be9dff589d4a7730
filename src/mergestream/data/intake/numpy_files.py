"""One .npy file -> uint8 images [3,H,W]. The header is checked before memory is taken; pickles are refused."""

import io
import math

import numpy as np

from mergestream.data.intake.limits import Allowance
from mergestream.data.intake.refusals import IntakeError
from mergestream.data.intake.shades import three_channels

MAGIC = b"\x93NUMPY"
# NumPy itself writes 118 bytes, or a few more for a long shape.
MOST_HEADER_BYTES = 1024
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
LAYOUTS = "[H,W], [3,H,W], [H,W,3], [B,3,H,W] or [B,H,W,3] (1 for 3 where images are grey)"


def read_array(data: bytes, allowance: Allowance) -> list[np.ndarray]:
    """Read the images of an array file."""
    shape, fortran, start = _header(data)
    images, height, width, channels_first = _layout(shape)
    if math.prod(shape) != len(data) - start:
        raise _damaged("its shape does not fit its number of bytes")
    allowance.take(images, height, width)
    array = np.frombuffer(data, np.uint8, offset=start).reshape(shape, order="F" if fortran else "C")
    if array.ndim == 2:
        array = array[..., None]
    batch = array[None] if array.ndim == 3 else array
    if channels_first:
        batch = batch.transpose(0, 2, 3, 1)
    return [three_channels(image) for image in batch]


def _header(data: bytes) -> tuple[tuple[int, ...], bool, int]:
    """Shape, whether columns come first, and where the numbers start."""
    file = io.BytesIO(data)
    try:
        read = HEADERS[np.lib.format.read_magic(file)]
        shape, fortran, dtype = read(file, max_header_size=MOST_HEADER_BYTES)
    except Exception:  # NumPy may raise anything on a hostile header, and quote it
        raise _damaged("its header is not that of an array of images") from None
    if dtype != np.uint8:
        raise IntakeError("wrong_type", "The array is not of type uint8. Send pixels from 0 to 255 as uint8.")
    if not all(0 <= length < 1 << 40 for length in shape):  # NumPy would fail on them with errors of its own
        raise _damaged("its shape is not that of images")
    return shape, fortran, file.tell()


def _layout(shape: tuple[int, ...]) -> tuple[int, int, int, bool]:
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


def _damaged(why: str) -> IntakeError:
    return IntakeError("damaged", f"The array file cannot be read: {why}. Write it with numpy.save.")
