"""Colour frames of DICOM -> uint8 [H,W,3]: palettes (PS3.3 C.7.6.3.1.5), and RGB of any depth."""

import numpy as np
from pydicom.dataset import Dataset

from mergestream.data.intake.dicom.lookup_table import read_table
from mergestream.data.intake.dicom.pixel_format import PixelFormat
from mergestream.data.intake.refusals import IntakeError, damaged_dicom
from mergestream.data.intake.shades import by_levels

PALETTE = "{}PaletteColorLookupTable{}"


def show_palette(values: np.ndarray, dataset: Dataset, form: PixelFormat, *, little_endian: bool) -> np.ndarray:
    """Look each value up in three tables; of 16 bits the upper eight are used."""
    planes = []
    for name in ("Red", "Green", "Blue"):
        if dataset.get(PALETTE.format(name, "Data")) is None:
            raise IntakeError(
                "unsupported_format", "The DICOM palette is missing, or segmented, which is not supported."
            )
        table = read_table(
            dataset,
            PALETTE.format(name, "Descriptor"),
            PALETTE.format(name, "Data"),
            little_endian=little_endian,
            signed=form.pixel_representation == 1,
        )
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
