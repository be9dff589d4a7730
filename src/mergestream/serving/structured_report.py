"""An answer as a DICOM structured report that refers to its image. It goes to the caller; nothing is stored.

A Comprehensive SR (PS3.3 A.35.3), so that numbers stay numbers. It names no patient: elements that are required but may
be empty (type 2) are empty, since the service never reads names. The archive fills them in from the study.
"""

import io
from collections.abc import Sequence
from datetime import UTC, datetime

import pydicom
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import UID, ComprehensiveSRStorage, ExplicitVRLittleEndian, generate_uid

from mergestream.data.intake import DicomSource, Picture
from mergestream.runtime.errors import InputError
from mergestream.serving.engine.answers import Answer

NOTICE = "For research, not a medical device."
SCHEME = "99MERGESTREAM"
TITLE = ("title", "Answer of a merged model")
EMPTY = (
    "PatientName", "PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "ReferringPhysicianName",
    "StudyID", "AccessionNumber", "Manufacturer",
)  # fmt: skip


def write_report(picture: Picture, answer: Answer, row: int, when: datetime | None = None) -> bytes:
    """Write the report of one image, row `row` of its batch, as a DICOM file. The image must have come from DICOM."""
    source = _require_source(picture)
    report = _document(source, (when or datetime.now(UTC)).astimezone(UTC))
    report.CurrentRequestedProcedureEvidenceSequence = [_evidence(source)]
    report.ContentSequence = _content(picture, source, answer, row)
    written = io.BytesIO()
    pydicom.dcmwrite(written, report, enforce_file_format=True)
    return written.getvalue()


def report_if_possible(picture: Picture, answer: Answer, row: int) -> bytes | None:
    """The report, or None if the image did not come from DICOM or lacks identifiers."""
    try:
        return write_report(picture, answer, row)
    except InputError:
        return None


def _require_source(picture: Picture) -> DicomSource:
    source = picture.source
    if source is None:
        raise InputError("A structured report refers to a DICOM image, and this one did not come from DICOM.")
    # IGNORE: pydicom would quote an invalid UID in its log.
    if not all(UID(uid, pydicom.config.IGNORE).is_valid for uid in vars(source).values()):
        raise InputError("A structured report needs the image's UIDs of class, instance, study and series, each valid.")
    return source


def _document(source: DicomSource, when: datetime) -> Dataset:
    """The modules around the content: patient and study, series, equipment, document."""
    report = Dataset()
    report.file_meta = FileMetaDataset()
    report.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    report.SpecificCharacterSet = "ISO_IR 192"
    report.SOPClassUID, report.SOPInstanceUID = ComprehensiveSRStorage, generate_uid(prefix=None)
    for keyword in EMPTY:
        setattr(report, keyword, "")
    report.StudyInstanceUID, report.SeriesInstanceUID = source.study_uid, generate_uid(prefix=None)
    report.Modality, report.SeriesNumber, report.InstanceNumber = "SR", 1, 1
    report.ReferencedPerformedProcedureStepSequence, report.PerformedProcedureCodeSequence = [], []
    report.CompletionFlag, report.VerificationFlag = "COMPLETE", "UNVERIFIED"
    report.ContentDate, report.ContentTime = f"{when:%Y%m%d}", f"{when:%H%M%S.%f}"
    report.TimezoneOffsetFromUTC = "+0000"
    report.ValueType, report.ContinuityOfContent = "CONTAINER", "SEPARATE"
    report.ConceptNameCodeSequence = [_code(*TITLE)]
    return report


def _evidence(source: DicomSource) -> Dataset:
    """Which study and series the image is from."""
    series, study = Dataset(), Dataset()
    series.SeriesInstanceUID, series.ReferencedSOPSequence = source.series_uid, [_reference(source)]
    study.StudyInstanceUID, study.ReferencedSeriesSequence = source.study_uid, [series]
    return study


def _reference(source: DicomSource, frame: int | None = None) -> Dataset:
    reference = Dataset()
    reference.ReferencedSOPClassUID, reference.ReferencedSOPInstanceUID = source.sop_class_uid, source.sop_instance_uid
    if frame is not None:
        reference.ReferencedFrameNumber = frame
    return reference


def _content(picture: Picture, source: DicomSource, answer: Answer, row: int) -> Sequence[Dataset]:
    probabilities = zip(answer.classes, answer.probabilities[row], strict=True)
    coefficients = zip(answer.experts, answer.encoder_coefficients or (), strict=False)
    image = _item("IMAGE", "image", "Image that was classified")
    image.ReferencedSOPSequence = [_reference(source, picture.frame)]
    return [
        _text("notice", "Notice", NOTICE),
        image,
        _text("predicted", "Predicted class", answer.predictions[row] or "undecided"),
        *(_named("class", name, "probability", number) for name, number in probabilities),
        *(_named("expert", name, "coefficient", number) for name, number in coefficients if number is not None),
        _text("pool", "sha-256 of the pool", answer.pool_sha256),
        _text("model", "sha-256 of the merged model", answer.weights_sha256 or "none: no single merged model answered"),
        _text("pixels", "sha-256 of the pixels", picture.pixels_sha256),
    ]


def _item(value_type: str, value: str, meaning: str) -> Dataset:
    item = Dataset()
    item.RelationshipType, item.ValueType = "CONTAINS", value_type
    item.ConceptNameCodeSequence = [_code(value, meaning)]
    return item


def _text(value: str, meaning: str, text: str) -> Dataset:
    item = _item("TEXT", value, meaning)
    item.TextValue = text
    return item


def _number(value: str, meaning: str, number: float) -> Dataset:
    item, measured = _item("NUM", value, meaning), Dataset()
    measured.NumericValue = f"{number:.10g}"
    measured.MeasurementUnitsCodeSequence = [_code("1", "no units", "UCUM")]
    item.MeasuredValueSequence = [measured]
    return item


def _named(kind: str, name: str, quantity: str, number: float) -> Dataset:
    """A number and what it belongs to, as one container: a code must mean the same in every report."""
    container = _item("CONTAINER", kind, kind.capitalize())
    container.ContinuityOfContent = "SEPARATE"
    container.ContentSequence = [_text("name", "Name", name), _number(quantity, quantity.capitalize(), number)]
    return container


def _code(value: str, meaning: str, scheme: str = SCHEME) -> Dataset:
    code = Dataset()
    code.CodeValue, code.CodingSchemeDesignator, code.CodeMeaning = value, scheme, meaning
    return code
