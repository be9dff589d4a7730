"""One image file -> uint8 [3,H,W]: colour, grey, palette, 16-bit, and DICOM as the service decodes it."""

import io
from importlib.util import find_spec
from pathlib import PurePosixPath

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mergestream.data.intake.dicom.decoder_pool import read_dicom
from mergestream.data.intake.limits import Allowance, Limits
from mergestream.data.intake.refusals import IntakeError
from mergestream.data.intake.shades import image_pixels, three_channels
from mergestream.runtime.errors import DataError

# The user's own files are trusted, so they may be large.
OWN = Limits(file_bytes=2**33, header_elements=2**24, pixels=2**28, decoded_bytes=2**33, seconds=600)
# A fundus photograph's frame is not quite black.
BLACK = 16


def read_pixels(content: bytes, name: str) -> Tensor:
    """Decode an image to uint8 [3,H,W]. Transparency is dropped; more than 8 bits are stretched over their range.

    DICOM is rescaled and windowed as in the service, so that an expert is trained on the pixels that it will see.
    """
    if PurePosixPath(name).suffix.lower() == ".dcm":
        return _dicom(content, name)
    try:
        opened = Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        raise DataError("not an image in a supported format") from None
    with opened as image:
        return torch.from_numpy(image_pixels(image))


def array_pixels(image: np.ndarray) -> Tensor:
    """Convert a row of an array, [H,W] or [H,W,1 or 3], to uint8 [3,H,W]."""
    if image.dtype != np.uint8 or image.ndim not in (2, 3):
        raise DataError(f"An image in an array is uint8 [H,W] or [H,W,3], got {image.dtype} {image.shape}.")
    return torch.from_numpy(three_channels(image))


def crop_border(image: Tensor) -> Tensor:
    """Crop to the smallest rectangle [3,h,w] that holds everything that is not black."""
    bright = image.amax(dim=0) > BLACK
    rows, columns = bright.any(dim=1).nonzero()[:, 0], bright.any(dim=0).nonzero()[:, 0]
    if not len(rows):
        return image
    return image[:, int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]


def _dicom(content: bytes, name: str) -> Tensor:
    if find_spec("pydicom") is None:
        raise DataError(f"{name} is DICOM: install pydicom (pip install 'mergestream[data]').")
    try:
        pictures = read_dicom(content, Allowance(OWN))
    except IntakeError as error:
        raise DataError(error.sentence) from error
    if len(pictures) > 1:
        raise DataError(f"the DICOM file holds {len(pictures)} frames; a data set has one image per file")
    return torch.from_numpy(pictures[0].pixels)
