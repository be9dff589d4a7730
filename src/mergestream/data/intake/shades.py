"""Decoded images of any bit depth -> uint8, by one rule for training and serving."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mergestream.runtime.errors import DataError


def image_shades(image: Any) -> np.ndarray:
    """Convert an image opened by Pillow to uint8 [H,W] or [H,W,3]."""
    deep = image.mode in ("I", "F") or image.mode.startswith("I;")
    return stretched(np.asarray(image)) if deep else np.array(image if image.mode == "L" else image.convert("RGB"))


def three_channels(pixels: np.ndarray) -> np.ndarray:
    """[H,W], [H,W,1] or [H,W,3] -> [3,H,W], a copy."""
    channels_first = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return np.broadcast_to(channels_first, (3, *channels_first.shape[1:])).copy(order="C")


def stretched(values: np.ndarray) -> np.ndarray:
    """Map any numbers to uint8, the lowest to black and the highest to white."""
    return by_levels(values, _stretched)


# The levels of 16 bits: a table of them is small compared with an image.
MOST_LEVELS = 1 << 16


def by_levels(values: np.ndarray, shade: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply `shade` to every value, computed once per level that occurs, to avoid a float copy of the image."""
    if not np.issubdtype(values.dtype, np.integer) or not values.size:
        return shade(values)
    low, span = int(values.min()), int(values.max()) - int(values.min()) + 1
    if span > MOST_LEVELS:
        return shade(values)
    places = (values - np.asarray(low, dtype=values.dtype)).view(f"u{values.dtype.itemsize}").ravel()
    parts = [slice(start, start + MOST_LEVELS) for start in range(0, len(places), MOST_LEVELS)]
    occurs = np.zeros(span, dtype=bool)
    for part in parts:  # in parts, since NumPy copies the indices as 64-bit integers
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
