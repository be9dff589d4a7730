"""The part of a DICOM file that says how pixels are stored and shown, and which object it is. Nothing else is read."""

import io
import logging
import warnings
import zlib
from dataclasses import dataclass
from functools import cache

import pydicom
from pydicom.datadict import tag_for_keyword
from pydicom.dataset import Dataset
from pydicom.filereader import read_dataset

from mergestream.data.intake.dicom.elements import Element, Syntax, Walk, damaged
from mergestream.data.intake.limits import MEBIBYTE, Limits
from mergestream.data.intake.pictures import Source
from mergestream.data.intake.refusals import IntakeError

START = 132  # after the preamble and 'DICM'
FILE_META = Syntax(explicit=True, little=True)
DEFLATED = "1.2.840.10008.1.2.1.99"
EXPLICIT, IMPLICIT, BIG_ENDIAN = "1.2.840.10008.1.2.1", "1.2.840.10008.1.2", "1.2.840.10008.1.2.2"

IDENTIFIERS = ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID")
STORED = (
    "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns",
    "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation",
    "ExtendedOffsetTable", "ExtendedOffsetTableLengths",
)  # fmt: skip
SHOWN = (
    "WindowCenter", "WindowWidth", "VOILUTFunction", "RescaleIntercept", "RescaleSlope",
    "ModalityLUTSequence", "VOILUTSequence", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
    "RedPaletteColorLookupTableDescriptor", "GreenPaletteColorLookupTableDescriptor",
    "BluePaletteColorLookupTableDescriptor", "RedPaletteColorLookupTableData", "GreenPaletteColorLookupTableData",
    "BluePaletteColorLookupTableData",
)  # fmt: skip
KEPT = frozenset(tag_for_keyword(name) for name in (*IDENTIFIERS, *STORED, *SHOWN))
TRANSFER_SYNTAX, PIXEL_DATA = 0x00020010, 0x7FE00010
# A scanner writes some twenty for each of its frames; pydicom makes an object of each.
MOST_ITEMS, ITEMS = 20_000, {True: b"\xfe\xff\x00\xe0", False: b"\xff\xfe\xe0\x00"}
FLOAT_PIXEL_DATA = (0x7FE00008, 0x7FE00009)


@dataclass(frozen=True)
class Header:
    """What is kept of a file: the elements about pixels, the pixels as stored, and how they are compressed."""

    dataset: Dataset
    transfer_syntax: str
    little: bool
    pixels: memoryview
    pixel_vr: str
    encapsulated: bool

    def source(self) -> Source:
        """The object's identifiers; empty where the file has none."""
        return Source(*(str(self.dataset.get(name) or "").strip() for name in IDENTIFIERS))


def read_header(data: bytes, limits: Limits) -> Header:
    """Walk over a file and keep what is needed."""
    _keep_pydicom_silent()
    transfer_syntax, start = _file_meta(data)
    body = memoryview(data)[start:]
    if transfer_syntax == DEFLATED:
        body, transfer_syntax = memoryview(_inflated(body, limits)), EXPLICIT
    syntax = Syntax(explicit=transfer_syntax != IMPLICIT, little=transfer_syntax != BIG_ENDIAN)
    kept, pixels = _kept(body, syntax, limits)
    dataset = read_dataset(io.BytesIO(kept), is_implicit_VR=not syntax.explicit, is_little_endian=syntax.little)
    vr = pixels.vr.decode() if pixels.vr else "OW"
    return Header(dataset, transfer_syntax, syntax.little, body[pixels.value : pixels.end], vr, pixels.undefined)


def _file_meta(data: bytes) -> tuple[str, int]:
    """The transfer syntax, and where the data set starts."""
    transfer_syntax = None
    for element in Walk(memoryview(data), most=100).elements(START, FILE_META):
        if element.tag >> 16 != 2:
            break
        if element.tag == TRANSFER_SYNTAX:
            transfer_syntax = data[element.value : element.end].rstrip(b"\0 ").decode("ascii")
        # Looked at here, since what follows may not be written as this part is.
        if data[element.stop : element.stop + 2] != b"\x02\0":
            if transfer_syntax is None:
                break
            return transfer_syntax, element.stop
    raise IntakeError("damaged", "The DICOM file does not say its transfer syntax (0002,0010).")


def _inflated(body: memoryview, limits: Limits) -> bytes:
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        inflated = inflate.decompress(body, limits.file_bytes)
    except zlib.error:
        raise damaged() from None
    if inflate.unconsumed_tail:
        mebibytes = limits.file_bytes / MEBIBYTE
        raise IntakeError("too_large", f"A deflated DICOM file may hold {mebibytes:,.1f} MiB, and this one has more.")
    if not inflate.eof:
        raise damaged()
    return inflated


def _kept(body: memoryview, syntax: Syntax, limits: Limits) -> tuple[bytes, Element]:
    """The elements that are needed, as they stand in the file, and where the pixels lie."""
    kept, size, seen = list[memoryview](), 0, set[int]()
    for element in Walk(body, limits.header_elements).elements(0, syntax):
        if element.tag in FLOAT_PIXEL_DATA:
            raise IntakeError("unsupported_format", "DICOM pixels that are floating numbers are not read here.")
        if element.tag == PIXEL_DATA:
            return _joined(kept, syntax), element
        if element.tag in KEPT:
            size += element.stop - element.start
            if size > limits.header_bytes:
                raise IntakeError("too_large", "The DICOM elements about pixels are larger than the service reads.")
            if element.tag in seen:
                raise damaged()
            seen.add(element.tag)
            kept.append(body[element.start : element.stop])
    raise IntakeError("not_an_image", "The DICOM object holds no pixels (7FE0,0010), so there is nothing to classify.")


def _joined(kept: list[memoryview], syntax: Syntax) -> bytes:
    joined = b"".join(kept)
    if joined.count(ITEMS[syntax.little]) > MOST_ITEMS:
        raise IntakeError("too_large", "The DICOM header has more items than the service reads.")
    return joined


@cache
def _keep_pydicom_silent() -> None:
    """pydicom quotes a header's values in its log and its warnings; no word of a patient may get there."""
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    pydicom.config.debugging = False
    logging.getLogger("pydicom").setLevel(logging.CRITICAL + 1)
    warnings.filterwarnings("ignore", module=r"pydicom(\.|$)")
