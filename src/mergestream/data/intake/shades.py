"""Decoded images of any depth -> uint8: by the same rule for the images that experts learn from and those they see."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mergestream.runtime.errors import DataError


def image_pixels(image: Any) -> np.ndarray:
    """uint8 [3,H,W] of an image that Pillow has opened."""
    deep = image.mode in ("I", "F") or image.mode.startswith("I;")
    return three_channels(stretched(np.asarray(image)) if deep else np.array(image.convert("RGB")))


def three_channels(pixels: np.ndarray) -> np.ndarray:
    """[H,W], [H,W,1] or [H,W,3] -> [3,H,W], a copy."""
    channels_first = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return np.broadcast_to(channels_first, (3, *channels_first.shape[1:])).copy(order="C")


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
    occurs = np.zeros(span, dtype=bool)
    for part in parts:  # in parts, as NumPy widens what it looks up by
        occurs[places[part]] = True
    levels = np.flatnonzero(occurs)
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
