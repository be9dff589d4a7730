"""One .npy file -> uint8 images [3,H,W]. The header is parsed here, before any memory is taken; never a pickle."""

import ast
import math
from typing import Any

import numpy as np

from mergestream.data.intake.limits import Allowance
from mergestream.data.intake.refusals import IntakeError
from mergestream.data.intake.shades import three_channels

MAGIC = b"\x93NUMPY"
# NumPy itself writes 118 bytes, or a few more for a long shape.
MOST_HEADER_BYTES = 1024
LAYOUTS = "[H,W], [3,H,W], [H,W,3], [B,3,H,W] or [B,H,W,3] (1 for 3 where images are grey)"


def read_array(data: bytes, allowance: Allowance) -> list[np.ndarray]:
    """The images of an array file."""
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
    # Copies: a view would keep the whole upload in memory as long as one of its pictures.
    return [three_channels(image) for image in batch]


def _header(data: bytes) -> tuple[tuple[int, ...], bool, int]:
    """Shape, whether columns come first, and where the numbers start."""
    wide = data[6:7] in (b"\x02", b"\x03")
    if data[6:8] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise _damaged("its version is not known")
    start = 12 if wide else 10
    length = int.from_bytes(data[8:start], "little")
    if length > MOST_HEADER_BYTES or len(data) < start + length:
        raise _damaged("its header is cut off, or longer than that of an array of images")
    fields = _parsed(data[start : start + length])
    if fields["descr"] not in ("|u1", "u1", "<u1", ">u1"):
        raise IntakeError("wrong_type", "The array is not of type uint8. Send pixels from 0 to 255 as uint8.")
    return fields["shape"], fields["fortran_order"], start + length


def _parsed(header: bytes) -> dict[str, Any]:
    try:
        fields = ast.literal_eval(header.decode("latin1").strip())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        fields = None
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise _damaged("its header is not that of an array")
    shape = fields["shape"]
    # Lengths beyond 2^40 have no use, and NumPy would choke on them with errors of its own.
    if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
        raise _damaged("its header holds no shape")
    if type(fields["fortran_order"]) is not bool:
        raise _damaged("its header does not say its order")
    return fields


def _layout(shape: tuple[int, ...]) -> tuple[int, int, int, bool]:
    """Number of images, height, width, and whether channels stand before them; where both fit they do, as in torch."""
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
