"""Small pictures and spreadsheets for stand-ins. The class is a pattern, the domain a colour, the number a shade."""

import io
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from mergestream.runtime.errors import DataError

FORMATS = {".bmp": "BMP", ".jpg": "JPEG", ".png": "PNG", ".tif": "TIFF", ".tiff": "TIFF", ".webp": "WEBP"}


def picture(domain: str, label: int, number: int, pixels: int = 24) -> np.ndarray:
    """uint8 [H,W,3]; the same arguments give the same picture."""
    random = np.random.RandomState([zlib.crc32(domain.encode()), label, number])
    colour = np.random.RandomState(zlib.crc32(domain.encode())).uniform(0.3, 1, size=3)
    y, x = np.mgrid[:pixels, :pixels] / pixels
    angle, waves = np.pi * label / 7, 2 + label % 4
    pattern = 0.5 + 0.4 * np.sin(2 * np.pi * waves * (x * np.cos(angle) + y * np.sin(angle)) + random.uniform(0, 6))
    noisy = pattern[..., None] * colour + random.normal(0, 0.05, size=(pixels, pixels, 3))
    return np.round(255 * noisy.clip(0, 1)).astype(np.uint8)


def write_picture(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(pixels, path.suffix))


def encoded(pixels: np.ndarray, suffix: str) -> bytes:
    """Encode a picture in the format of an ending such as '.png'."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, FORMATS[suffix])
    return buffer.getvalue()


def xls(rows: list[tuple[str | int, ...]], sheet: str) -> bytes:
    """An .xls file of one sheet."""
    try:
        import xlwt
    except ImportError as error:
        raise DataError("Writing an .xls stand-in needs xlwt: pip install 'mergestream[dev]'.") from error
    book = xlwt.Workbook(encoding="utf-8")
    page = book.add_sheet(sheet)
    for number, cells in enumerate(rows):
        for place, cell in enumerate(cells):
            page.write(number, place, cell)
    buffer = io.BytesIO()
    book.save(buffer)
    return buffer.getvalue()


def xlsx(rows: list[list[str]], sheet: str) -> bytes:
    """An .xlsx file of one sheet of text."""
    try:
        import openpyxl
    except ImportError as error:
        raise DataError("Writing an .xlsx stand-in needs openpyxl: pip install 'mergestream[data]'.") from error
    book = openpyxl.Workbook()
    book.active.title = sheet
    for row in rows:
        book.active.append(row)
    buffer = io.BytesIO()
    book.save(buffer)
    return buffer.getvalue()
