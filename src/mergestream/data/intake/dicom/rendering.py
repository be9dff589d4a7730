"""A DICOM file -> uint8 frames as shown to a radiologist. Runs in the child process.

Lookup tables are not by pydicom's `apply_voi` and `apply_color_lut`: they count in the entries' own type, so an 8-bit
table of more than 256 entries gives wrong shades; they refuse padded tables, and read palettes in the machine's order.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from pydicom.dataset import Dataset

from mergestream.data.intake.dicom.frames import decode_frames
from mergestream.data.intake.dicom.header import GREY, DicomHeader, PixelFormat, read_header, read_pixel_format
from mergestream.data.intake.limits import Allowance, IntakeError, damaged_dicom
from mergestream.data.intake.shades import by_levels, stretched

Transform = Callable[[np.ndarray], np.ndarray]
IDENTIFIERS = ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID")
WHITE = 255
PALETTE = "{}PaletteColorLookupTable{}"


class LookupTable(NamedTuple):
    """Entries [N], all below 2^bits; the first one is for the stored value `first`."""

    entries: np.ndarray
    first: int
    bits: int

    def look_up(self, values: np.ndarray) -> np.ndarray:
        """Entries for values of any shape; values beyond the ends get the first or last entry (PS3.3 C.11.1.1)."""
        places = np.clip(np.rint(values).astype(np.int64) - self.first, 0, len(self.entries) - 1)
        return self.entries[places]


def read_table(holder: Dataset, descriptor: str, entries: str, form: PixelFormat) -> LookupTable:
    """Read a table from two elements of a data set or an item."""
    order = "<" if form.little_endian else ">"
    count, first, bits = (int(number) for number in _words(holder.get(descriptor), f"{order}u2"))
    count, first = count & 0xFFFF or 1 << 16, first & 0xFFFF
    if form.pixel_representation and first >= 1 << 15:
        first -= 1 << 16
    if not 1 <= bits <= 16:
        raise damaged_dicom()
    return LookupTable(_entries(holder.get(entries), count, bits, order), first, bits)


def _entries(value: Any, count: int, bits: int, order: str) -> np.ndarray:
    narrow = bits <= 8 and isinstance(value, bytes) and len(value) in (count, count + count % 2)
    words = _words(value, "u1" if narrow else f"{order}u2")[:count]
    if len(words) < count:
        raise damaged_dicom()
    # Some writers put 8-bit entries into the upper half of 16.
    if bits <= 8 and words.max() > 255:
        words = words >> 8
    if int(words.max()) >> bits:
        raise damaged_dicom()
    return words


def _words(value: Any, dtype: str) -> np.ndarray:
    """Numbers that pydicom returns as bytes, as one number or as several."""
    if isinstance(value, bytes):
        return np.frombuffer(value[: len(value) - len(value) % np.dtype(dtype).itemsize], dtype).astype(np.int64)
    return np.atleast_1d(np.asarray(value, dtype=np.int64))


def decode_file(data: bytes, allowance: Allowance) -> tuple[list[str], Iterator[np.ndarray]]:
    """The object's UIDs, and its frames uint8 [H,W] or [H,W,3], decoded while they are iterated over."""
    header = read_header(data, allowance.limits)
    form = read_pixel_format(header, allowance)
    identifiers = [str(header.dataset.get(name) or "").strip() for name in IDENTIFIERS]  # empty where it has none
    return identifiers, _shown_frames(header, form)


def _shown_frames(header: DicomHeader, form: PixelFormat) -> Iterator[np.ndarray]:
    for number, (values, colour) in enumerate(decode_frames(header, form)):
        if values.shape[:2] != (form.rows, form.columns):
            raise damaged_dicom()
        if form.photometric_interpretation in GREY:
            yield show_grey(values, header.dataset, form, number)
        elif form.photometric_interpretation == "PALETTE COLOR":
            yield show_palette(values, header.dataset, form)
        else:
            yield show_rgb(values, form, colour)


def show_grey(values: np.ndarray, dataset: Dataset, form: PixelFormat, frame: int) -> np.ndarray:
    """Shades uint8 [H,W] of the frame with this number, from 0."""
    rescale = _rescale(dataset, form, frame)
    window = _window(dataset, form, frame)
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


def _rescale(dataset: Dataset, form: PixelFormat, frame: int) -> Transform:
    """The modality transformation: a table, a slope and an intercept, or nothing."""
    if dataset.get("ModalityLUTSequence"):
        table = read_table(dataset.ModalityLUTSequence[0], "LUTDescriptor", "LUTData", form)
        return lambda levels: table.look_up(levels).astype(np.float64)
    holder = _holder(dataset, frame, "PixelValueTransformationSequence", "RescaleSlope")
    if holder is None:
        return lambda levels: levels.astype(np.float64)
    slope, intercept = _first(holder, "RescaleSlope"), _first(holder, "RescaleIntercept")
    if slope == 0:
        raise damaged_dicom()
    return lambda levels: levels.astype(np.float64) * slope + intercept


def _window(dataset: Dataset, form: PixelFormat, frame: int) -> Transform | None:
    """The first VOI table, or the first window; None if there is neither."""
    holder = _holder(dataset, frame, "FrameVOILUTSequence", "VOILUTSequence")
    if holder is not None:
        table = read_table(holder.VOILUTSequence[0], "LUTDescriptor", "LUTData", form)
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


def show_palette(values: np.ndarray, dataset: Dataset, form: PixelFormat) -> np.ndarray:
    """Look each value up in three tables; of 16 bits the upper eight are used."""
    planes = []
    for name in ("Red", "Green", "Blue"):
        if dataset.get(PALETTE.format(name, "Data")) is None:
            raise IntakeError(
                "unsupported_format", "The DICOM palette is missing, or segmented, which is not supported."
            )
        table = read_table(dataset, PALETTE.format(name, "Descriptor"), PALETTE.format(name, "Data"), form)
        eight_bits = table._replace(entries=(table.entries >> max(table.bits - 8, 0)).astype(np.uint8))
        planes.append(by_levels(values, eight_bits.look_up))
    return np.stack(planes, axis=-1)


def show_rgb(values: np.ndarray, form: PixelFormat, colour: str) -> np.ndarray:
    """RGB of 8 bits unchanged; other depths are scaled from their whole range to 0 to 255."""
    if colour != "RGB" or values.ndim != 3 or values.shape[-1] != 3:
        raise damaged_dicom()
    if values.dtype == np.uint8 and form.bits_stored == 8:
        return values
    most = (1 << form.bits_stored) - 1
    return by_levels(values, lambda levels: np.rint(np.clip(levels, 0, most) * (255 / most)).astype(np.uint8))
