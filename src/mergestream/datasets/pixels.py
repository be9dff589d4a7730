"""One image file -> uint8 [3,H,W]: colour, grey, palette, 16-bit and DICOM."""

import io
from collections.abc import Callable
from pathlib import PurePosixPath

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mergestream.errors import DataError

# A fundus photograph's frame is not quite black.
BLACK = 16


def read_pixels(content: bytes, name: str) -> Tensor:
    """uint8 [3,H,W] of an image's bytes. Transparency is dropped; more than 8 bits are stretched over their range."""
    if PurePosixPath(name).suffix.lower() == ".dcm":
        return three_channels(_dicom(content, name))
    try:
        opened = Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        raise DataError("not an image in a format that is known here") from None
    with opened as image:
        return image_pixels(image)


def image_pixels(image: Image.Image) -> Tensor:
    """uint8 [3,H,W] of an image that Pillow has opened."""
    deep = image.mode in ("I", "F") or image.mode.startswith("I;")
    return three_channels(stretched(np.asarray(image)) if deep else np.array(image.convert("RGB")))


def array_pixels(image: np.ndarray) -> Tensor:
    """uint8 [3,H,W] of a row of an array: [H,W] or [H,W,1 or 3]."""
    if image.dtype != np.uint8 or image.ndim not in (2, 3):
        raise DataError(f"An image in an array is uint8 [H,W] or [H,W,3], got {image.dtype} {image.shape}.")
    return three_channels(image)


def crop_border(image: Tensor) -> Tensor:
    """The smallest rectangle [3,h,w] that holds all that is not black."""
    bright = image.amax(dim=0) > BLACK
    rows, columns = bright.any(dim=1).nonzero()[:, 0], bright.any(dim=0).nonzero()[:, 0]
    if not len(rows):
        return image
    return image[:, int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]


def three_channels(pixels: np.ndarray) -> Tensor:
    """[H,W], [H,W,1] or [H,W,3] -> [3,H,W]."""
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=-1)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def stretched(values: np.ndarray) -> np.ndarray:
    """Any numbers -> uint8, the lowest to black and the highest to white."""
    return by_levels(values, _stretched)


# As many levels as 16 bits have: a table of them is small beside an image.
MOST_LEVELS = 1 << 16


def by_levels(values: np.ndarray, shade: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`shade` of every value, worked out once for each level that occurs: floats of a whole image would be large."""
    if not np.issubdtype(values.dtype, np.integer) or not values.size:
        return shade(values)
    low, span = int(values.min()), int(values.max()) - int(values.min()) + 1
    if span > MOST_LEVELS:
        return shade(values)
    places = (values - np.asarray(low, dtype=values.dtype)).view(f"u{values.dtype.itemsize}").ravel()
    parts = [slice(start, start + MOST_LEVELS) for start in range(0, len(places), MOST_LEVELS)]
    found = np.zeros(span, dtype=bool)
    for part in parts:  # in parts, as NumPy widens what it looks up by
        found[places[part]] = True
    levels = np.flatnonzero(found)
    shades = shade(levels + low)
    table, shaded = np.zeros(span, dtype=shades.dtype), np.empty(len(places), dtype=shades.dtype)
    table[levels] = shades
    for part in parts:
        shaded[part] = table[places[part]]
    return shaded.reshape(values.shape)


def _stretched(values: np.ndarray) -> np.ndarray:
    low, high = float(values.min()), float(values.max())
    if not np.isfinite([low, high]).all():
        raise DataError("the image holds numbers that are not finite")
    return np.round((values.astype(np.float64) - low) * (255 / (high - low) if high > low else 0)).astype(np.uint8)


def _dicom(content: bytes, name: str) -> np.ndarray:
    try:
        import pydicom
    except ImportError as error:
        raise DataError(f"{name} is DICOM: install pydicom (pip install 'mergestream[data]').") from error
    file = pydicom.dcmread(io.BytesIO(content))
    values = stretched(file.pixel_array)
    return 255 - values if file.get("PhotometricInterpretation") == "MONOCHROME1" else values
