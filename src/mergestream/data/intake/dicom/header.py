"""The elements of a DICOM file up to its pixels, read by pydicom: how its pixels are stored, whose image it is.

An element stays raw bytes until it is used.
"""

import io
import zlib
from dataclasses import asdict, dataclass
from typing import Any

from pydicom.dataset import Dataset
from pydicom.filereader import read_dataset

from mergestream.data.intake.limits import MEBIBYTE, Allowance, IntakeError, Limits, damaged_dicom

PREAMBLE_BYTES = 132  # with the letters 'DICM'
DEFLATED = "1.2.840.10008.1.2.1.99"
EXPLICIT, IMPLICIT, BIG_ENDIAN = "1.2.840.10008.1.2.1", "1.2.840.10008.1.2", "1.2.840.10008.1.2.2"

PIXEL_DATA, FLOAT_PIXEL_DATA = 0x7FE00010, (0x7FE00008, 0x7FE00009)
UNDEFINED_LENGTH = 0xFFFFFFFF
ITEM_TAGS = (b"\xfe\xff\x00\xe0", b"\xff\xfe\xe0\x00")  # little and big endian


@dataclass(frozen=True)
class DicomHeader:
    """The elements before the pixels, and the pixel data as stored."""

    dataset: Dataset
    transfer_syntax: str
    pixels: bytes
    pixel_vr: str
    encapsulated: bool


def read_header(data: bytes, limits: Limits) -> DicomHeader:
    """Read the elements of a file that has its preamble."""
    file = io.BytesIO(data)
    file.seek(PREAMBLE_BYTES)
    meta = read_dataset(file, is_implicit_VR=False, is_little_endian=True, stop_when=lambda tag, *_: tag >> 16 != 2)
    transfer_syntax = str(meta.get("TransferSyntaxUID") or "")
    if not transfer_syntax:
        raise IntakeError("damaged", "The DICOM file does not say its transfer syntax (0002,0010).")
    body = data[file.tell() :]
    if not body:
        raise damaged_dicom()
    if transfer_syntax == DEFLATED:
        body, transfer_syntax = _inflated(body, limits), EXPLICIT
    dataset = _elements(body, transfer_syntax, limits)
    pixels = dataset.get_item("PixelData")
    vr = str(pixels.VR or "OW")
    return DicomHeader(dataset, transfer_syntax, pixels.value or b"", vr, pixels.length == UNDEFINED_LENGTH)


def _elements(body: bytes, transfer_syntax: str, limits: Limits) -> Dataset:
    # pydicom makes an object of every item, a thousand bytes for eight of the file's.
    if max(map(body.count, ITEM_TAGS)) > limits.header_elements:
        raise _too_many_elements()
    file, count, end, pixels_seen = io.BytesIO(body), 0, 0, False

    def stop(tag: int, _: str | None, length: int) -> bool:
        """Check an element before its value is read; stop after the pixels."""
        nonlocal count, end, pixels_seen
        count += 1
        if pixels_seen:
            return True
        if count > limits.header_elements:
            raise _too_many_elements()
        if tag in FLOAT_PIXEL_DATA:
            raise IntakeError("unsupported_format", "DICOM pixels that are floating-point numbers are not supported.")
        end = len(body) if length == UNDEFINED_LENGTH else file.tell() + length
        if end > len(body):
            raise damaged_dicom()
        pixels_seen = tag == PIXEL_DATA
        return False

    dataset = read_dataset(
        file,
        is_implicit_VR=transfer_syntax == IMPLICIT,
        is_little_endian=transfer_syntax != BIG_ENDIAN,
        stop_when=stop,
    )
    absent = "PixelData" not in dataset
    if absent and (pixels_seen or end < len(body)):  # cut off inside a compressed frame, or inside an element's head
        raise damaged_dicom()
    if absent:
        raise IntakeError(
            "not_an_image", "The DICOM object holds no pixels (7FE0,0010), so there is nothing to classify."
        )
    return dataset


def _inflated(body: bytes, limits: Limits) -> bytes:
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    inflated = inflate.decompress(body, limits.file_bytes)
    if inflate.unconsumed_tail:
        mebibytes = limits.file_bytes / MEBIBYTE
        raise IntakeError("too_large", f"A deflated DICOM file may hold {mebibytes:,.1f} MiB; this one has more.")
    if not inflate.eof:
        raise damaged_dicom()
    return inflated


def _too_many_elements() -> IntakeError:
    return IntakeError("too_large", "The DICOM header has more elements than the service allows.")


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
    little_endian: bool

    @property
    def frame_bytes(self) -> int:
        """Bytes of one uncompressed frame; YBR_FULL_422 stores half of the colour."""
        whole = self.rows * self.columns * self.samples_per_pixel * self.bits_allocated // 8
        return whole * 2 // 3 if self.photometric_interpretation == "YBR_FULL_422" else whole

    def decoder_options(self) -> dict[str, Any]:
        """Options of pydicom's decoders, but the number of frames."""
        other = ("number_of_frames", "little_endian")
        return {name: value for name, value in asdict(self).items() if name not in other}


def read_pixel_format(header: DicomHeader, allowance: Allowance) -> PixelFormat:
    """Read and check the format; room for all frames is reserved before any is decoded."""
    dataset = header.dataset
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
        little_endian=header.transfer_syntax != BIG_ENDIAN,
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
    """Refuse numbers that contradict each other, and formats that are not supported."""
    luminance, bits = form.photometric_interpretation.startswith("YBR"), (form.bits_allocated, form.bits_stored)
    unsupported = {
        f"The DICOM image's kind of colour is not supported; supported: {', '.join(SAMPLES)}.": (
            form.photometric_interpretation not in SAMPLES
        ),
        "Only DICOM pixels of 8, 16 or 32 bits are supported.": form.bits_allocated not in (8, 16, 32),
        "DICOM pixels that do not start at their lowest bit are not supported.": high_bit != form.bits_stored - 1,
        "DICOM colour as luminance and chrominance is supported with 8 bits only.": luminance and bits != (8, 8),
    }
    for sentence, true in unsupported.items():
        if true:
            raise IntakeError("unsupported_format", sentence)
    if (
        min(form.number_of_frames, form.rows, form.columns) < 1
        or SAMPLES[form.photometric_interpretation] != form.samples_per_pixel
        or not 1 <= form.bits_stored <= form.bits_allocated
        or form.pixel_representation not in (0, 1)
        or form.planar_configuration not in (0, 1)
        or (form.samples_per_pixel == 3 and form.pixel_representation)
    ):
        raise damaged_dicom()


# Elements about patient and study that a report takes over from its image: keyword and value representation, in the
# order of `header_texts`. They are never logged.
ELEMENTS = {
    "PatientName": "PN",
    "PatientID": "LO",
    "IssuerOfPatientID": "LO",
    "PatientBirthDate": "DA",
    "PatientSex": "CS",
    "StudyDate": "DA",
    "StudyTime": "TM",
    "AccessionNumber": "SH",
    "StudyID": "SH",
    "StudyDescription": "LO",
    "ReferringPhysicianName": "PN",
    "InstanceNumber": "IS",
}
LONGEST = 200  # a name of three groups; other elements are shorter


def header_texts(data: bytes, limits: Limits) -> list[str]:
    """The text of each element, decoded by the file's character set; empty where it has none."""
    dataset = read_header(data, limits).dataset
    return [str(dataset.get(keyword) or "").strip(" \0")[:LONGEST] for keyword in ELEMENTS]
