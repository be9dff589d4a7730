"""Spreadsheets for stand-ins: the same rows give the same bytes, which the usual writers do not promise."""

import io
import zipfile
from xml.sax.saxutils import escape

from mergestream.runtime.errors import DataError

_NAMESPACE = "http://schemas.openxmlformats.org"
_MAIN, _LINKS = f"{_NAMESPACE}/spreadsheetml/2006/main", f"{_NAMESPACE}/package/2006/relationships"
_OFFICE = f"{_NAMESPACE}/officeDocument/2006/relationships"
_TYPE = "application/vnd.openxmlformats-officedocument.spreadsheetml"


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
    cells = "".join(
        f'<row r="{number}">'
        + "".join(f'<c t="inlineStr"><is><t xml:space="preserve">{escape(cell)}</t></is></c>' for cell in row)
        + "</row>"
        for number, row in enumerate(rows, start=1)
    )
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{_NAMESPACE}/package/2006/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{_TYPE}.sheet.main+xml"/>'
        f'<Override PartName="/xl/worksheets/sheet1.xml" ContentType="{_TYPE}.worksheet+xml"/></Types>',
        "_rels/.rels": _link(f"{_OFFICE}/officeDocument", "xl/workbook.xml"),
        "xl/workbook.xml": f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}"><sheets>'
        f'<sheet name="{escape(sheet)}" sheetId="1" r:id="rId1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": _link(f"{_OFFICE}/worksheet", "worksheets/sheet1.xml"),
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{_MAIN}"><sheetData>{cells}</sheetData></worksheet>',
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in parts.items():
            archive.writestr(zipfile.ZipInfo(name, (2013, 7, 3, 0, 0, 0)), f'<?xml version="1.0"?>{text}')
    return buffer.getvalue()


def _link(kind: str, target: str) -> str:
    link = f'<Relationship Id="rId1" Type="{kind}" Target="{target}"/>'
    return f'<Relationships xmlns="{_LINKS}">{link}</Relationships>'
