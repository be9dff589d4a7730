"""Spreadsheets for stand-ins."""

import io

from mergestream.runtime.errors import DataError


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
