"""Answers as a DICOM structured report: TID 1500 in a Comprehensive SR, built by highdicom, that refers to its images.

Without a received object it names no patient: elements that are required but may be empty (type 2) are empty, since
the service never reads names from uploads. The archive fills them in from the study.
"""

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pydicom
from highdicom import sr
from highdicom._standard_utils import get_sop_class_iod_map
from pydicom.dataset import Dataset
from pydicom.sr.codedict import codes
from pydicom.uid import UID, generate_uid

from mergestream.data.intake.pictures import DicomSource, Picture
from mergestream.pool.class_concepts import Concepts
from mergestream.pool.expert_card import version_of
from mergestream.serving.dicom_network.results import UnitSummary
from mergestream.serving.engine.answers import Answer
from mergestream.serving.reports.source_header import NOBODY, Texts, derived_uid, set_texts

NOTICE = "For research, not a medical device."
ALONE = "Answered from this image and the stream's earlier ones alone."
TOGETHER = "Answered together with other images, and may depend on them."
HOW = {"mean": "Mean over the images of the", "worst": "Worst image of the"}
SCHEME, MAKER, LONGEST_MEANING, SERIES_NUMBER = "99MERGESTREAM", "mergestream", 64, 9901
DEVICE = derived_uid(MAKER, "device observer")


class ReportedImage(NamedTuple):
    """A picture from DICOM, its source, and the answer to it alone."""

    picture: Picture
    source: DicomSource
    answer: Answer


@dataclass(frozen=True)
class ReportRequest:
    """What all kinds of reports are made from: images of one series or study, and who they are of."""

    images: Sequence[ReportedImage]
    uid: str  # of the report
    summary: UnitSummary | None = None
    texts: Texts = field(default_factory=lambda: NOBODY, repr=False)
    concepts: Concepts = field(default_factory=dict)


def reported_image(picture: Picture, answer: Answer, row: int) -> ReportedImage | None:
    """Row `row` of a batch; None without valid UIDs from DICOM, or if highdicom does not know the SOP class."""
    source = picture.source
    if source is None or source.sop_class_uid not in get_sop_class_iod_map():
        return None
    # IGNORE: pydicom would quote an invalid UID in its log.
    valid = all(UID(uid, pydicom.config.IGNORE).is_valid for uid in vars(source).values())
    return ReportedImage(picture, source, answer.of(row)) if valid else None


def write_report(picture: Picture, answer: Answer, row: int, concepts: Concepts | None = None) -> bytes | None:
    """The report of one uploaded image, row `row` of its batch, as a DICOM file; None without valid UIDs from DICOM."""
    image = reported_image(picture, answer, row)
    return image and structured_report(ReportRequest([image], generate_uid(prefix=None), concepts=concepts or {}))


def structured_report(request: ReportRequest) -> bytes:
    """A DICOM file with one group of measurements per image, and one of the series or study if it has an answer."""
    first = request.images[0]
    report = sr.ComprehensiveSR(
        evidence=[*{image.source.sop_instance_uid: _evidence(image.source) for image in request.images}.values()],
        content=_content(request)[0],
        series_instance_uid=derived_uid("series", "sr", first.source.series_uid, first.answer.pool_sha256),
        series_number=SERIES_NUMBER,
        sop_instance_uid=request.uid,
        instance_number=max(1, int(request.texts["InstanceNumber"] or 1)),
        manufacturer=MAKER,
        manufacturer_model_name=MAKER,
        software_versions=version_of(MAKER),
        series_description=NOTICE,
        is_complete=True,
    )
    set_texts(report, request.texts)
    if not request.texts["StudyDate"]:  # else times are those of the study's place
        report.TimezoneOffsetFromUTC, now = "+0000", datetime.now(UTC)
        for date, clock in (("ContentDate", "ContentTime"), ("InstanceCreationDate", "InstanceCreationTime")):
            setattr(report, date, f"{now:%Y%m%d}")
            setattr(report, clock, f"{now:%H%M%S.%f}")
    return as_file(report)


def as_file(report: Dataset) -> bytes:
    written = io.BytesIO()
    pydicom.dcmwrite(written, report, enforce_file_format=True)
    return written.getvalue()


def _evidence(source: DicomSource) -> Dataset:
    """The image as highdicom takes it, without anything about the patient."""
    dataset = Dataset()
    dataset.SOPClassUID, dataset.SOPInstanceUID = source.sop_class_uid, source.sop_instance_uid
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = source.study_uid, source.series_uid
    for name in NOBODY:
        setattr(dataset, name, None)
    return dataset


def _content(request: ReportRequest) -> Any:
    device = sr.DeviceObserverIdentifyingAttributes(uid=DEVICE, name=MAKER, manufacturer_name=MAKER, model_name=MAKER)
    observer = sr.ObserverContext(observer_type=codes.DCM.Device, observer_identifying_attributes=device)
    groups = [_image_group(request, image, f"image {n}") for n, image in enumerate(request.images, start=1)]
    return sr.MeasurementReport(
        observation_context=sr.ObservationContext(observer_device_context=observer),
        procedure_reported=codes.SCT.ImagingProcedure,
        imaging_measurements=groups if request.summary is None else [*groups, _unit_group(request, request.summary)],
        title=codes.DCM.ImagingMeasurementReport,
    )


def _image_group(request: ReportRequest, image: ReportedImage, name: str) -> Any:
    """The answer to one image. Where the service abstains, no class is shown, not even by its probability."""
    answer, source = image.answer, image.source
    reasons = ", ".join(answer.abstained[0]) if answer.abstained else "undecided"
    findings = [
        _evaluation("guard_finding", "Guard finding", each.code, f"{each.severity}: {each.code}".replace("_", " "))
        for each in answer.findings
        if each.concerns(answer.position or 0)
    ]
    dependence = ("alone", ALONE) if answer.batch_size == 1 else ("together", TOGETHER)
    evaluations = [*findings, _evaluation("dependence", "Dependence on other images", *dependence)]
    prediction = None if answer.abstained else answer.predictions[0]
    result = _result(request, prediction, answer.classes, answer.probabilities[0], reasons)
    frames = None if image.picture.frame is None else [image.picture.frame]
    reference = sr.SourceImageForMeasurementGroup(source.sop_class_uid, source.sop_instance_uid, frames)
    return _group(request, name, result, evaluations, _parameters(image), [reference])


def _unit_group(request: ReportRequest, summary: UnitSummary) -> Any:
    """The one answer to a series or study: the mean of its images' answers, or the worst one."""
    sources = dict.fromkeys((image.source.sop_class_uid, image.source.sop_instance_uid) for image in request.images)
    result = _result(request, summary.prediction, summary.classes, summary.probabilities, "undecided")
    unit, how = summary.unit, f"{HOW[summary.how]} {summary.unit}"
    stated = _evaluation(f"{unit}_answer", f"Answer to the {unit}", summary.how, how)
    pool = f"pool sha-256: {request.images[0].answer.pool_sha256}"
    references = [sr.SourceImageForMeasurementGroup(*source) for source in sources]
    return _group(request, unit, result, [stated], [pool], references)


Result = tuple[list[Any], Any]  # measurements, and the predicted class or why there is none


def _result(
    request: ReportRequest, prediction: str | None, classes: Sequence[str], values: Sequence[float], reasons: str
) -> Result:
    if prediction is None:
        text = f"The service abstains: {reasons}".replace("_", " ")
        return [], _evaluation("no_result", "No result", "abstained", text)
    concepts, how = request.concepts, _code("probability", "Probability of the class")
    measurements = [
        sr.Measurement(class_concept(name, concepts), float(value), codes.UCUM.NoUnits, derivation=how)
        for name, value in zip(classes, values, strict=True)
    ]
    predicted = _code("predicted", "Predicted class")
    return measurements, sr.QualitativeEvaluation(predicted, class_concept(prediction, concepts))


def _group(
    request: ReportRequest, name: str, result: Result, evaluations: Sequence[Any], parameters: list[str],
    references: Sequence[Any],
) -> Any:  # fmt: skip
    """A measurement group (TID 1501) with its algorithm; the notice is in every group."""
    notice = _evaluation("intended_use", "Intended use", "research_use", NOTICE)
    return sr.MeasurementsAndQualitativeEvaluations(
        tracking_identifier=sr.TrackingIdentifier(uid=derived_uid("group", request.uid, name), identifier=name),
        algorithm_id=sr.AlgorithmIdentification(name=MAKER, version=version_of(MAKER), parameters=parameters),
        measurements=result[0] or None,
        qualitative_evaluations=[result[1], *evaluations, notice],
        source_images=references,
    )


def _parameters(image: ReportedImage) -> list[str]:
    """What identifies the model that answered, as texts of the algorithm."""
    answer, audit = image.answer, image.answer.audit
    coefficients: Mapping[str, float | None] = answer.encoder_coefficients or {}
    return [
        f"pool sha-256: {answer.pool_sha256}",
        f"model sha-256: {answer.weights_sha256 or 'none: no single merged model answered'}",
        f"pixels sha-256: {image.picture.pixels_sha256}",
        *(f"coefficient of {name}: {number!r}" for name, number in coefficients.items() if number is not None),
        *([f"audit line {audit['sequence']}: {audit['hash']}"] if audit.get("hash") else []),
    ]


def _evaluation(value: str, meaning: str, answer: str, sentence: str) -> Any:
    return sr.QualitativeEvaluation(_code(value, meaning), _code(answer, sentence))


def class_concept(name: str, concepts: Concepts) -> Any:
    """The code of a class: from the experts' cards, or a private one that is the same in every report."""
    if name in concepts:
        return sr.CodedConcept(concepts[name]["value"], concepts[name]["scheme"], _shortened(concepts[name]["meaning"]))
    return _code(f"class-{hashlib.sha256(name.encode()).hexdigest()[:10]}", name.replace("\\", "/"))


def _code(value: str, meaning: str) -> Any:
    return sr.CodedConcept(value, SCHEME, _shortened(meaning))


def _shortened(meaning: str) -> str:
    """At most 64 bytes of UTF-8: the standard allows 64 characters, but validators count bytes."""
    if len(meaning.encode()) <= LONGEST_MEANING:
        return meaning
    return f"{meaning.encode()[: LONGEST_MEANING - 3].decode(errors='ignore')}..."
