"""How pixels are stored: sizes and types, checked against each other and against the limits."""

from dataclasses import asdict, dataclass
from typing import Any

from pydicom.dataset import Dataset

from mergestream.data.intake.limits import Allowance
from mergestream.data.intake.refusals import IntakeError, damaged_dicom

GREY = ("MONOCHROME1", "MONOCHROME2")
SAMPLES = {
    **dict.fromkeys((*GREY, "PALETTE COLOR"), 1),
    **dict.fromkeys(("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT"), 3),
}


@dataclass(frozen=True)
class PixelFormat:
    """The image pixel module (PS3.3 C.7.6.3); names are those of pydicom's decoders."""

    number_of_frames: int
    rows: int
    columns: int
    samples_per_pixel: int
    photometric_interpretation: str
    planar_configuration: int
    bits_allocated: int
    bits_stored: int
    pixel_representation: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of one uncompressed frame; YBR_FULL_422 stores half of the colour."""
        whole = self.rows * self.columns * self.samples_per_pixel * self.bits_allocated // 8
        return whole * 2 // 3 if self.photometric_interpretation == "YBR_FULL_422" else whole

    @property
    def most_run_length_bytes(self) -> int:
        """More than any encoder needs for a frame: its header, and two bytes per byte."""
        return 64 + 2 * self.frame_bytes + 2 * self.samples_per_pixel * self.bits_allocated

    def decoder_options(self) -> dict[str, Any]:
        """Options of pydicom's decoders, but the number of frames."""
        return {name: value for name, value in asdict(self).items() if name != "number_of_frames"}


def read_pixel_format(dataset: Dataset, allowance: Allowance) -> PixelFormat:
    """Read and check the format; room for all frames is reserved before any is decoded."""
    form = PixelFormat(
        number_of_frames=_number(dataset, "NumberOfFrames", 1),
        rows=_number(dataset, "Rows"),
        columns=_number(dataset, "Columns"),
        samples_per_pixel=_number(dataset, "SamplesPerPixel", 1),
        photometric_interpretation=str(dataset.get("PhotometricInterpretation") or "").strip(),
        planar_configuration=_number(dataset, "PlanarConfiguration", 0),
        bits_allocated=_number(dataset, "BitsAllocated"),
        bits_stored=_number(dataset, "BitsStored"),
        pixel_representation=_number(dataset, "PixelRepresentation", 0),
    )
    _require_supported(form, _number(dataset, "HighBit", form.bits_stored - 1))
    if form.number_of_frames > allowance.limits.frames:
        most = allowance.limits.frames
        raise IntakeError("too_many", f"A DICOM file may hold {most:,} frames; this one announces more.")
    allowance.take(form.number_of_frames, form.rows, form.columns)
    return form


def _number(dataset: Dataset, keyword: str, default: int | None = None) -> int:
    value = dataset.get(keyword)
    if value is None or value == "":
        value = default
    if value is None:
        raise damaged_dicom()
    return int(value)


def _require_supported(form: PixelFormat, high_bit: int) -> None:
    if min(form.number_of_frames, form.rows, form.columns) < 1:
        raise damaged_dicom()
    if form.photometric_interpretation not in SAMPLES:
        names = ", ".join(SAMPLES)
        raise IntakeError(
            "unsupported_format", f"The DICOM image's kind of colour is not supported; supported: {names}."
        )
    if SAMPLES[form.photometric_interpretation] != form.samples_per_pixel:
        raise damaged_dicom()
    if form.bits_allocated not in (8, 16, 32):
        raise IntakeError("unsupported_format", "Only DICOM pixels of 8, 16 or 32 bits are supported.")
    if not 1 <= form.bits_stored <= form.bits_allocated or form.pixel_representation not in (0, 1):
        raise damaged_dicom()
    if high_bit != form.bits_stored - 1:
        raise IntakeError("unsupported_format", "DICOM pixels that do not start at their lowest bit are not supported.")
    if form.planar_configuration not in (0, 1):
        raise damaged_dicom()
    if form.photometric_interpretation.startswith("YBR") and (form.bits_allocated, form.bits_stored) != (8, 8):
        raise IntakeError(
            "unsupported_format", "DICOM colour as luminance and chrominance is supported with 8 bits only."
        )
    if form.samples_per_pixel == 3 and form.pixel_representation:
        raise damaged_dicom()
