"""An answer as a DICOM structured report that refers to its image. It goes to the caller; nothing is stored.

A Comprehensive SR (PS3.3 A.35.3), so that numbers stay numbers. It names no patient: elements that are required but may
be empty (type 2) are empty, since the service never reads names. The archive fills them in from the study.
"""

import io
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pydicom
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import UID, ComprehensiveSRStorage, ExplicitVRLittleEndian, generate_uid

from mergestream.data.intake.pictures import DicomSource, Picture
from mergestream.serving.engine.answers import Answer

NOTICE = "For research, not a medical device."
ALONE = "Answered from this image and the stream's earlier ones alone."
TOGETHER = "Answered together with other images: beside others the same image may get another answer."
SCHEME = "99MERGESTREAM"
TITLE = ("title", "Answer of a merged model")
EMPTY = (
    "PatientName", "PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "ReferringPhysicianName",
    "StudyID", "AccessionNumber", "Manufacturer",
)  # fmt: skip


def write_report(picture: Picture, answer: Answer, row: int) -> bytes | None:
    """The report of one image, row `row` of its batch, as a DICOM file; None without valid identifiers from DICOM."""
    source = picture.source
    # IGNORE: pydicom would quote an invalid UID in its log.
    if source is None or not all(UID(uid, pydicom.config.IGNORE).is_valid for uid in vars(source).values()):
        return None
    report = _document(source, datetime.now(UTC))
    report.CurrentRequestedProcedureEvidenceSequence = [_evidence(source)]
    report.ContentSequence = _content(picture, source, answer.of(row))
    written = io.BytesIO()
    pydicom.dcmwrite(written, report, enforce_file_format=True)
    return written.getvalue()


def _dataset(**elements: Any) -> Dataset:
    dataset = Dataset()
    for keyword, value in elements.items():
        setattr(dataset, keyword, value)
    return dataset


def _document(source: DicomSource, when: datetime) -> Dataset:
    """The modules around the content: patient and study, series, equipment, document."""
    report = _dataset(**dict.fromkeys(EMPTY, ""), SpecificCharacterSet="ISO_IR 192", TimezoneOffsetFromUTC="+0000")
    report.file_meta = FileMetaDataset()
    report.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    report.SOPClassUID, report.SOPInstanceUID = ComprehensiveSRStorage, generate_uid(prefix=None)
    report.StudyInstanceUID, report.SeriesInstanceUID = source.study_uid, generate_uid(prefix=None)
    report.Modality, report.SeriesNumber, report.InstanceNumber = "SR", 1, 1
    report.ReferencedPerformedProcedureStepSequence, report.PerformedProcedureCodeSequence = [], []
    report.CompletionFlag, report.VerificationFlag = "COMPLETE", "UNVERIFIED"
    report.ContentDate, report.ContentTime = f"{when:%Y%m%d}", f"{when:%H%M%S.%f}"
    report.ValueType, report.ContinuityOfContent = "CONTAINER", "SEPARATE"
    report.ConceptNameCodeSequence = [_code(*TITLE)]
    return report


def _evidence(source: DicomSource) -> Dataset:
    """Which study and series the image is from."""
    series = _dataset(SeriesInstanceUID=source.series_uid, ReferencedSOPSequence=[_reference(source)])
    return _dataset(StudyInstanceUID=source.study_uid, ReferencedSeriesSequence=[series])


def _reference(source: DicomSource, frame: int | None = None) -> Dataset:
    uids = {"ReferencedSOPClassUID": source.sop_class_uid, "ReferencedSOPInstanceUID": source.sop_instance_uid}
    return _dataset(**uids, **({} if frame is None else {"ReferencedFrameNumber": frame}))


def _content(picture: Picture, source: DicomSource, answer: Answer) -> Sequence[Dataset]:
    """The answer to one image. Where the service abstains, no class is shown, not even by its probability."""
    probabilities = zip(answer.classes, answer.probabilities[0], strict=True)
    coefficients = (answer.encoder_coefficients or {}).items()
    reference = [_reference(source, picture.frame)]
    findings = [finding for finding in answer.findings if finding.concerns(answer.position or 0)]
    result = _text("predicted", "Predicted class", answer.predictions[0] or "undecided")
    classes = [_named("class", name, "probability", number) for name, number in probabilities]
    if answer.abstained:
        reasons = ", ".join(answer.abstained[0])
        result, classes = _text("no_result", "No result", f"The service abstains: {reasons}."), []
    return [
        _text("notice", "Notice", NOTICE),
        _item("IMAGE", "image", "Image that was classified", ReferencedSOPSequence=reference),
        result,
        *classes,
        *(_text("finding", "Finding", f"{each.severity}: {each.code}: {each.sentence}") for each in findings),
        _text("dependence", "Dependence on other images", ALONE if answer.batch_size == 1 else TOGETHER),
        *(_named("expert", name, "coefficient", number) for name, number in coefficients if number is not None),
        _text("pool", "sha-256 of the pool", answer.pool_sha256),
        _text("model", "sha-256 of the merged model", answer.weights_sha256 or "none: no single merged model answered"),
        _text("pixels", "sha-256 of the pixels", picture.pixels_sha256),
    ]


def _item(value_type: str, value: str, meaning: str, **elements: Any) -> Dataset:
    name = [_code(value, meaning)]
    return _dataset(RelationshipType="CONTAINS", ValueType=value_type, ConceptNameCodeSequence=name, **elements)


def _text(value: str, meaning: str, text: str) -> Dataset:
    return _item("TEXT", value, meaning, TextValue=text)


def _named(kind: str, name: str, quantity: str, number: float) -> Dataset:
    """A number and what it belongs to, as one container: a code must mean the same in every report."""
    units = [_code("1", "no units", "UCUM")]
    measured = _dataset(NumericValue=f"{number:.10g}", MeasurementUnitsCodeSequence=units)
    content = [
        _text("name", "Name", name),
        _item("NUM", quantity, quantity.capitalize(), MeasuredValueSequence=[measured]),
    ]
    return _item("CONTAINER", kind, kind.capitalize(), ContinuityOfContent="SEPARATE", ContentSequence=content)


def _code(value: str, meaning: str, scheme: str = SCHEME) -> Dataset:
    return _dataset(CodeValue=value, CodingSchemeDesignator=scheme, CodeMeaning=meaning)
