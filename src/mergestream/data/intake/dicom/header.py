"""The elements of a DICOM file up to its pixels, read by pydicom. An element stays raw bytes until it is used."""

import io
import zlib
from dataclasses import dataclass

from pydicom.dataset import Dataset
from pydicom.filereader import read_dataset

from mergestream.data.intake.limits import MEBIBYTE, Limits
from mergestream.data.intake.refusals import IntakeError, damaged_dicom

PREAMBLE_BYTES = 132  # with the letters 'DICM'
DEFLATED = "1.2.840.10008.1.2.1.99"
EXPLICIT, IMPLICIT, BIG_ENDIAN = "1.2.840.10008.1.2.1", "1.2.840.10008.1.2", "1.2.840.10008.1.2.2"

IDENTIFIERS = ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID")
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

    @property
    def little_endian(self) -> bool:
        return self.transfer_syntax != BIG_ENDIAN

    def identifiers(self) -> list[str]:
        """The object's UIDs; empty where the file has none."""
        return [str(self.dataset.get(name) or "").strip() for name in IDENTIFIERS]


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
