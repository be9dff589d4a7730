"""Stored grey values -> uint8 as shown to a radiologist: rescaled, windowed, inverted (PS3.3 C.11.1, C.11.2)."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from pydicom.dataset import Dataset

from mergestream.data.intake.dicom.lookup_table import LookupTable, read_table
from mergestream.data.intake.dicom.pixel_format import PixelFormat
from mergestream.data.intake.refusals import IntakeError, damaged_dicom
from mergestream.data.intake.shades import by_levels, stretched

Transform = Callable[[np.ndarray], np.ndarray]
WHITE = 255


def show_grey(
    values: np.ndarray, dataset: Dataset, form: PixelFormat, frame: int, *, little_endian: bool
) -> np.ndarray:
    """Shades uint8 [H,W] of the frame with this number, from 0."""
    rescale = _rescale(dataset, form, frame, little_endian)
    window = _window(dataset, form, frame, little_endian)
    inverted = form.photometric_interpretation == "MONOCHROME1"

    def shade(levels: np.ndarray) -> np.ndarray:
        rescaled = rescale(levels)
        if not np.isfinite(rescaled).all():
            raise damaged_dicom()
        shades = stretched(rescaled) if window is None else np.rint(window(rescaled)).astype(np.uint8)
        return WHITE - shades if inverted else shades

    return by_levels(values, shade)


def linear(values: np.ndarray, centre: float, width: float) -> np.ndarray:
    """C.11.2.1.2.1: the window's ends are half a value further in, as it counts whole values."""
    if width == 1:
        return np.where(values <= centre - 0.5, 0.0, WHITE)
    return np.clip((values - (centre - 0.5)) / (width - 1) + 0.5, 0, 1) * WHITE


def linear_exact(values: np.ndarray, centre: float, width: float) -> np.ndarray:
    """C.11.2.1.3.2."""
    return np.clip((values - centre) / width + 0.5, 0, 1) * WHITE


def sigmoid(values: np.ndarray, centre: float, width: float) -> np.ndarray:
    """C.11.2.1.3.1; the clip only keeps the exponential finite."""
    return WHITE / (1 + np.exp(np.clip(-4 * (values - centre) / width, -700, 700)))


WINDOWS = {"LINEAR": linear, "LINEAR_EXACT": linear_exact, "SIGMOID": sigmoid}


def _rescale(dataset: Dataset, form: PixelFormat, frame: int, little_endian: bool) -> Transform:
    """The modality transformation: a table, a slope and an intercept, or nothing."""
    if dataset.get("ModalityLUTSequence"):
        table = _sequence_table(dataset.ModalityLUTSequence, form, little_endian)
        return lambda levels: table.look_up(levels).astype(np.float64)
    holder = _holder(dataset, frame, "PixelValueTransformationSequence", "RescaleSlope")
    if holder is None:
        return lambda levels: levels.astype(np.float64)
    slope, intercept = _first(holder, "RescaleSlope"), _first(holder, "RescaleIntercept")
    if slope == 0:
        raise damaged_dicom()
    return lambda levels: levels.astype(np.float64) * slope + intercept


def _window(dataset: Dataset, form: PixelFormat, frame: int, little_endian: bool) -> Transform | None:
    """The first VOI table, or the first window; None if there is neither."""
    holder = _holder(dataset, frame, "FrameVOILUTSequence", "VOILUTSequence")
    if holder is not None:
        table = _sequence_table(holder.VOILUTSequence, form, little_endian)
        return lambda values: table.look_up(values) * (WHITE / ((1 << table.bits) - 1))
    holder = _holder(dataset, frame, "FrameVOILUTSequence", "WindowWidth")
    if holder is None:
        return None
    name = str(holder.get("VOILUTFunction") or "LINEAR").strip()
    if name not in WINDOWS:
        raise IntakeError("unsupported_format", f"The DICOM window's function is not one of {', '.join(WINDOWS)}.")
    width = _first(holder, "WindowWidth")
    if width <= 0 or (name == "LINEAR" and width < 1):
        raise damaged_dicom()
    return partial(WINDOWS[name], centre=_first(holder, "WindowCenter"), width=width)


def _sequence_table(items: Sequence[Dataset], form: PixelFormat, little_endian: bool) -> LookupTable:
    return read_table(
        items[0], "LUTDescriptor", "LUTData", little_endian=little_endian, signed=form.pixel_representation == 1
    )


def _holder(dataset: Dataset, frame: int, group: str, keyword: str) -> Dataset | None:
    """The data set that holds an attribute: of the frame, of all frames, or (in older objects) of the image."""
    per_frame, shared = dataset.get("PerFrameFunctionalGroupsSequence"), dataset.get("SharedFunctionalGroupsSequence")
    groups = [items[place] for items, place in ((per_frame, frame), (shared, 0)) if items]
    holders = [own[group][0] for own in groups if own.get(group)]
    return next((holder for holder in (*holders, dataset) if holder.get(keyword) not in (None, "", [])), None)


def _first(holder: Dataset, keyword: str) -> float:
    """The first value of a number; pydicom returns several as a list."""
    value = holder.get(keyword)
    number = float(value[0] if isinstance(value, Sequence) and not isinstance(value, str) else value)
    if not np.isfinite(number):
        raise damaged_dicom()
    return number
