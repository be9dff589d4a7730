"""Answers as a readable page, for viewers that show no structured reports: Secondary Capture and encapsulated PDF;
and the table of all kinds of reports that a destination can ask for.

The page holds no text about the patient; the objects' headers do, as those of structured reports.
"""

import io
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from highdicom.sc import SCImage
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian

from mergestream.pool.expert_card import version_of
from mergestream.serving.reports.source_header import derived_uid, set_texts
from mergestream.serving.reports.structured_report import (
    MAKER,
    NOTICE,
    SERIES_NUMBER,
    ReportRequest,
    as_file,
    structured_report,
)

PDF = "1.2.840.10008.5.1.4.1.1.104.1"
MOST_IMAGES, MOST_CLASSES, WIDTH = 12, 6, 100  # shown, and characters per line


def secondary_capture(request: ReportRequest) -> bytes:
    """The page as a colour image in a DICOM file."""
    canvas = FigureCanvasAgg(_page(request))
    canvas.draw()
    pixels = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
    capture = SCImage(
        pixels, "RGB", 8, "PATIENT", study_instance_uid=request.images[0].source.study_uid,
        series_instance_uid=_series_uid(request, "sc"), series_number=SERIES_NUMBER + 1, sop_instance_uid=request.uid,
        instance_number=1, manufacturer=MAKER, patient_orientation=("L", "P"), series_description=NOTICE,
    )  # fmt: skip
    capture.BurnedInAnnotation = "NO"  # of the patient's identity
    capture.Laterality = ""
    capture.SourceImageSequence = _references(request)
    set_texts(capture, request.texts)
    return as_file(capture)


def encapsulated_pdf(request: ReportRequest) -> bytes:
    """The page as a PDF document in a DICOM file."""
    written, now, report = io.BytesIO(), datetime.now(), Dataset()
    _page(request).savefig(written, format="pdf", metadata={"Title": NOTICE, "CreationDate": None})
    document = written.getvalue()
    report.file_meta = FileMetaDataset()
    report.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    elements: dict[str, Any] = {
        "SOPClassUID": PDF, "SOPInstanceUID": request.uid, "StudyInstanceUID": request.images[0].source.study_uid,
        "SeriesInstanceUID": _series_uid(request, "pdf"), "SeriesNumber": SERIES_NUMBER + 2, "InstanceNumber": 1,
        "Modality": "DOC", "Manufacturer": MAKER, "ConversionType": "WSD", "SeriesDescription": NOTICE,
        "ContentDate": f"{now:%Y%m%d}", "ContentTime": f"{now:%H%M%S}", "AcquisitionDateTime": "",
        "BurnedInAnnotation": "NO", "DocumentTitle": NOTICE, "ConceptNameCodeSequence": [],
        "SourceInstanceSequence": _references(request), "MIMETypeOfEncapsulatedDocument": "application/pdf",
        "EncapsulatedDocumentLength": len(document), "EncapsulatedDocument": document + b"\0" * (len(document) % 2),
    }  # fmt: skip
    for keyword, value in elements.items():
        setattr(report, keyword, value)
    set_texts(report, request.texts)
    return as_file(report)


def _series_uid(request: ReportRequest, kind: str) -> str:
    return derived_uid("series", kind, request.images[0].source.series_uid, request.images[0].answer.pool_sha256)


def _references(request: ReportRequest) -> list[Dataset]:
    references = {}
    for source in (image.source for image in request.images):
        reference = references[source.sop_instance_uid] = Dataset()
        reference.ReferencedSOPClassUID, reference.ReferencedSOPInstanceUID = (
            source.sop_class_uid,
            source.sop_instance_uid,
        )
    return [*references.values()]


def _page(request: ReportRequest) -> Figure:
    lines = [line[:WIDTH] for line in _lines(request)]
    inches = 1.3 + 0.17 * len(lines)
    figure = Figure(figsize=(8.3, inches), dpi=100)
    style: dict[str, Any] = {"va": "top", "parse_math": False}
    figure.text(0.06, 1 - 0.3 / inches, "Answer of a merged model", fontsize=16, weight="bold", **style)
    figure.text(0.06, 1 - 0.6 / inches, NOTICE, fontsize=13, weight="bold", color="#b00020", **style)
    figure.text(0.06, 1 - 1.0 / inches, "\n".join(lines), fontsize=8.5, family="monospace", linespacing=1.4, **style)
    return figure


def _lines(request: ReportRequest) -> list[str]:
    lines, summary, first = list[str](), request.summary, request.images[0].answer
    if summary is not None:
        name = summary.unit.capitalize()
        lines += [f"{name} of {len(request.images)} images ({summary.how}): {summary.prediction or 'no result'}"]
        lines += [] if summary.prediction is None else _bars(summary.classes, summary.probabilities)
    for number, image in enumerate(request.images[:MOST_IMAGES], start=1):
        answer = image.answer
        reasons = ", ".join(answer.abstained[0]).replace("_", " ") if answer.abstained else ""
        result = f"no result, the service abstains: {reasons}" if answer.abstained else answer.predictions[0]
        lines += ["", f"Image {number}: {result}"]
        lines += [] if answer.abstained else _bars(answer.classes, answer.probabilities[0])
        shown = [each for each in answer.findings if each.concerns(answer.position or 0)]
        lines += [f"  {each.severity}: {each.sentence}" for each in shown]
    if len(request.images) > MOST_IMAGES:
        lines += ["", f"{len(request.images) - MOST_IMAGES} more images: see the structured report."]
    model = f"model {first.weights_sha256}" if len(request.images) == 1 else ""
    return [*lines, "", f"pool  {first.pool_sha256}", *([model] if model else []), f"mergestream {version_of(MAKER)}"]


def _bars(classes: Any, probabilities: Any) -> list[str]:
    """The likeliest classes, each with a bar."""
    ordered = sorted(zip(probabilities, classes, strict=True), reverse=True)[:MOST_CLASSES]
    return [f"  {name[:32]:32} {share:7.4f}  {'█' * round(30 * share)}" for share, name in ordered]


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
