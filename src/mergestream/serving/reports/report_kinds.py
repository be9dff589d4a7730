"""The kinds of reports that a destination can ask for."""

from collections.abc import Callable
from typing import NamedTuple

from mergestream.serving.reports.report_pages import PDF, encapsulated_pdf, secondary_capture
from mergestream.serving.reports.structured_report import ReportRequest, structured_report


class ReportKind(NamedTuple):
    """A SOP class, and how a DICOM file of it is made."""

    sop_class: str
    make: Callable[[ReportRequest], bytes]


# By the word in a destinations file.
KINDS = {
    "sr": ReportKind("1.2.840.10008.5.1.4.1.1.88.33", structured_report),
    "sc": ReportKind("1.2.840.10008.5.1.4.1.1.7", secondary_capture),
    "pdf": ReportKind(PDF, encapsulated_pdf),
}
