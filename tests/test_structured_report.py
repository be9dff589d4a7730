"""Answers as DICOM structured reports: read back, checked for what the standard requires, free of patients."""

import io
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from highdicom import sr
from pydicom.dataset import Dataset

from dicoms import SECRET, UIDS, dicom
from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import Limits
from mergestream.data.intake.pictures import Picture
from mergestream.serving.dicom_network.negotiation import image_classes
from mergestream.serving.dicom_network.results import UnitSummary
from mergestream.serving.guards.findings import Finding
from mergestream.serving.reports import report_pages
from mergestream.serving.reports.report_pages import KINDS
from mergestream.serving.reports.source_header import NOBODY, derived_uid, read_texts
from mergestream.serving.reports.structured_report import (
    NOTICE,
    ReportRequest,
    reported_image,
    structured_report,
    write_report,
)
from services import ANSWER

# Type 1 in PS3.3: SR Document Series, General and Content (C.17.1 to C.17.3), SOP Common (C.12.1).
TYPE_1 = (
    "SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "Modality", "SeriesNumber",
    "InstanceNumber", "CompletionFlag", "VerificationFlag", "ContentDate", "ContentTime", "ValueType",
    "ConceptNameCodeSequence", "ContinuityOfContent", "ContentSequence", "CurrentRequestedProcedureEvidenceSequence",
)  # fmt: skip
TYPE_2 = (
    "PatientName", "PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "ReferringPhysicianName",
    "StudyID", "AccessionNumber", "Manufacturer", "ReferencedPerformedProcedureStepSequence",
    "PerformedProcedureCodeSequence",
)  # fmt: skip


CONCEPTS = {"benign": {"value": "3898006", "scheme": "SCT", "meaning": "Neoplasm, benign"}}


def pictures(frames: int = 1, **elements: object) -> list[Picture]:
    pixels = np.random.default_rng(0).integers(0, 256, (frames * 8, 9), dtype=np.uint8)
    return read_upload(dicom(pixels, Rows=8, NumberOfFrames=frames, **elements), Limits())


def report(picture: Picture) -> Dataset:
    data = write_report(picture, ANSWER, 0)
    assert data is not None
    assert data[128:132] == b"DICM"
    return pydicom.dcmread(io.BytesIO(data))


def groups(data: bytes) -> list[Any]:
    return sr.srread(io.BytesIO(data)).content.get_image_measurement_groups()


def evaluations(group: Any) -> dict[str, Any]:
    return {each.name.value: each.value for each in group.get_qualitative_evaluations()}


def parameters(group: Any) -> dict[str, str]:
    items = [each for each in group[0].ContentSequence if each.name.meaning == "Algorithm Parameters"]
    return dict(each.value.split(": ", 1) for each in items)


def test_what_the_standard_requires_is_there() -> None:
    written = report(pictures()[0])
    assert all(written.get(keyword) not in (None, "") for keyword in TYPE_1)
    assert all(keyword in written for keyword in TYPE_2)
    assert written.SOPClassUID == written.file_meta.MediaStorageSOPClassUID == "1.2.840.10008.5.1.4.1.1.88.33"
    assert (written.Modality, written.ValueType, written.VerificationFlag) == ("SR", "CONTAINER", "UNVERIFIED")
    assert written.CompletionFlag == "COMPLETE"
    assert written.ContentTemplateSequence[0].TemplateIdentifier == "1500"


def test_the_answer_can_be_read_back_by_highdicom() -> None:
    (group,) = groups(write_report(pictures()[0], ANSWER, 0, CONCEPTS) or b"")
    numbers = {each.name.meaning: each.value for each in group.get_measurements()}
    assert numbers == {"Neoplasm, benign": ANSWER.probabilities[0][0], ANSWER.classes[1]: ANSWER.probabilities[0][1]}
    assert {each.unit.value for each in group.get_measurements()} == {"1"}
    codes = {each.name.scheme_designator: each.name.value for each in group.get_measurements()}
    assert codes["SCT"] == "3898006"
    result = evaluations(group)
    assert (result["predicted"].meaning, result["predicted"].value) == (ANSWER.predictions[0], codes["99MERGESTREAM"])
    assert result["intended_use"].meaning == NOTICE
    about = parameters(group)
    assert (about["pool sha-256"], about["model sha-256"]) == (ANSWER.pool_sha256, ANSWER.weights_sha256)
    for name, coefficient in (ANSWER.encoder_coefficients or {}).items():
        assert float(about[f"coefficient of {name}"]) == coefficient


def test_findings_of_this_image_are_evaluations_and_an_abstention_shows_no_class() -> None:
    findings = (
        Finding("blank_pictures", "warning", "…", {"positions": [0], "pictures": 1}),
        Finding("saturated_expert", "alarm", "…", {"positions": [5], "pictures": 1}),
    )
    unsure = replace(ANSWER, findings=findings, predictions=(None,), abstained={0: ["low_confidence"]})
    data = write_report(pictures()[0], unsure, 0) or b""
    (group,) = groups(data)
    assert not group.get_measurements()
    result = evaluations(group)
    assert result["guard_finding"].meaning == "warning: blank pictures"
    assert result["no_result"].meaning == "The service abstains: low confidence"
    assert "predicted" not in result
    assert ANSWER.classes[0].encode() not in data
    assert len([e for e in group.get_qualitative_evaluations() if e.name.value == "guard_finding"]) == 1


def test_the_image_and_the_frame_are_referred_to() -> None:
    one, (_, second) = pictures()[0], pictures(frames=2)
    for picture in (one, second):
        written = report(picture)
        (study,) = written.CurrentRequestedProcedureEvidenceSequence
        (series,) = study.ReferencedSeriesSequence
        (evidence,) = series.ReferencedSOPSequence
        (group,) = groups(write_report(picture, ANSWER, 0) or b"")
        (image,) = group.source_images
        assert written.StudyInstanceUID == study.StudyInstanceUID == UIDS["StudyInstanceUID"]
        assert series.SeriesInstanceUID == UIDS["SeriesInstanceUID"] != written.SeriesInstanceUID
        assert evidence.ReferencedSOPClassUID == image.referenced_sop_class_uid == UIDS["SOPClassUID"]
        assert evidence.ReferencedSOPInstanceUID == image.referenced_sop_instance_uid == UIDS["SOPInstanceUID"]
        assert image.referenced_frame_numbers == (None if picture.frame is None else [picture.frame])


@pytest.mark.parametrize("unit", ["series", "study"])
def test_a_series_or_study_has_one_answer_beside_those_of_its_images(unit: str) -> None:
    pages = pictures() + pictures(SOPInstanceUID="1.2.9", SeriesInstanceUID="1.2.8" if unit == "study" else "1.2.3.5")
    images = [made for picture in pages if (made := reported_image(picture, ANSWER, 0))]
    summary = UnitSummary(unit, "worst", ANSWER.classes, (0.25, 0.75), ANSWER.classes[1])
    request = ReportRequest(images, derived_uid("report"), summary)
    data = structured_report(request)
    *each, whole = groups(data)
    assert len(each) == 2
    assert [measured.value for measured in whole.get_measurements()] == [0.25, 0.75]
    shown = evaluations(whole)[f"{unit}_answer"]
    assert (shown.value, shown.meaning) == ("worst", f"Worst image of the {unit}")
    assert len(whole.source_images) == 2
    (study,) = pydicom.dcmread(io.BytesIO(data)).CurrentRequestedProcedureEvidenceSequence
    assert len(study.ReferencedSeriesSequence) == len({image.source.series_uid for image in images})
    assert report_pages._lines(request)[0].startswith(f"{unit.capitalize()} of 2 images (worst)")


def test_a_report_of_a_received_object_belongs_to_its_patient_and_study(tmp_path: Path) -> None:
    elements = {"PatientName": "Æsir^Ødger", "PatientID": "P-1", "PatientSex": "F", "StudyDate": "2026-1-1",
                "StudyTime": "101112", "AccessionNumber": "A-7", "SpecificCharacterSet": "ISO_IR 100"}  # fmt: skip
    file = tmp_path / "object"
    file.write_bytes(dicom(np.zeros((8, 9), np.uint8), **elements))
    image = reported_image(read_upload(file.read_bytes(), Limits())[0], ANSWER, 0)
    assert image is not None
    texts = read_texts(file, Limits())
    written = pydicom.dcmread(io.BytesIO(structured_report(ReportRequest([image], derived_uid(1), texts=texts))))
    assert (str(written.PatientName), written.PatientID, written.PatientSex) == ("Æsir^Ødger", "P-1", "F")
    assert (written.AccessionNumber, written.StudyTime) == ("A-7", "101112")
    assert written.StudyDate == ""  # invalid there, so not taken over
    assert "Æsir" not in repr(ReportRequest([image], "1", texts=texts))


def batch_of_long_names() -> ReportRequest:
    """A series whose images were answered together, with classes of long and foreign names."""
    long = ("Übergangszellkarzinom der ableitenden Harnwege, schlecht differenziert, G3", "腫瘍" * 30)
    answer = replace(ANSWER, classes=long, predictions=long[:1], batch_size=2)
    frames = pictures(frames=2, SOPClassUID="1.2.840.10008.5.1.4.1.1.3.1")  # Ultrasound Multi-frame
    images = [made for picture in frames if (made := reported_image(picture, answer, 0))]
    concepts = {long[1]: {"value": "1", "scheme": "SCT", "meaning": "é" * 64}}
    summary = UnitSummary("series", "mean", long, (0.25, 0.75), long[1])
    return ReportRequest(images, derived_uid("batch"), summary, concepts=concepts)


def test_meanings_of_codes_have_64_bytes_at_most_and_sentences_are_whole() -> None:
    written = pydicom.dcmread(io.BytesIO(structured_report(batch_of_long_names())))
    meanings = {element.value for element in written.iterall() if element.keyword == "CodeMeaning"}
    assert max(len(meaning.encode()) for meaning in meanings) <= 64
    cut = [meaning for meaning in meanings if meaning.endswith("...")]
    assert sorted(meaning[0] for meaning in cut) == ["Ü", "é"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dciodvfy") is None, reason="dciodvfy (Debian's dicom3tools) is not installed")
def test_dciodvfy_reports_no_error(tmp_path: Path) -> None:
    finding = Finding("structureless_pictures", "alarm", "…")
    for number, answer in enumerate((ANSWER, replace(ANSWER, findings=(finding,), abstained={0: ["low_confidence"]}))):
        file = tmp_path / f"{number}.dcm"
        file.write_bytes(write_report(pictures()[0], answer, 0, CONCEPTS) or b"")
        require_no_error(file, "ComprehensiveSR")
    file.write_bytes(structured_report(batch_of_long_names()))
    require_no_error(file, "ComprehensiveSR")
    image = reported_image(pictures()[0], ANSWER, 0)
    assert image is not None
    for kind, name in (("sc", "SCImage"), ("pdf", "EncapsulatedPDF")):
        file.write_bytes(KINDS[kind].make(ReportRequest([image], derived_uid(kind))))
        require_no_error(file, name)


def require_no_error(file: Path, name: str) -> None:
    result = subprocess.run(["dciodvfy", str(file)], capture_output=True, text=True)
    assert name in result.stderr
    assert "Error" not in result.stderr + result.stdout


@pytest.mark.parametrize("kind", ["sc", "pdf"])
def test_a_page_shows_the_answer_and_no_patient(kind: str) -> None:
    finding = Finding("structureless_pictures", "alarm", "An image has no structure.")
    answer = replace(ANSWER, findings=(finding,), classes=("benign", "$x$ <b>"), predictions=("$x$ <b>",))
    image = reported_image(pictures()[0], answer, 0)
    assert image is not None
    texts = dict(NOBODY, PatientName=f"{SECRET}^Name", PatientID=SECRET, AccessionNumber=SECRET)
    summary = UnitSummary("series", "mean", ANSWER.classes, ANSWER.probabilities[0], ANSWER.predictions[0])
    request = ReportRequest([image] * 20, derived_uid(kind), summary, texts)
    lines = "\n".join(report_pages._lines(request))
    for text in ("$x$ <b>", "0.8765", "An image has no structure.", ANSWER.pool_sha256, "8 more images"):
        assert text in lines
    assert SECRET not in lines
    made = pydicom.dcmread(io.BytesIO(KINDS[kind].make(request)))
    assert (made.SOPClassUID, made.PatientID, made.SeriesDescription) == (KINDS[kind].sop_class, SECRET, NOTICE)
    if kind == "sc":
        assert made.pixel_array.shape[2] == 3
        assert made.pixel_array.min() < 100
    else:
        assert made.EncapsulatedDocument.startswith(b"%PDF")
        assert SECRET.encode() not in made.EncapsulatedDocument


def test_no_patient_is_named_and_every_report_is_another_object() -> None:
    picture = pictures()[0]
    assert SECRET.encode() not in (write_report(picture, ANSWER, 0) or SECRET.encode())
    assert report(picture).SOPInstanceUID != report(picture).SOPInstanceUID


def test_times_are_utc() -> None:
    written = report(pictures()[0])
    when = datetime.strptime(f"{written.ContentDate} {written.ContentTime} +0000", "%Y%m%d %H%M%S.%f %z")
    assert abs(when - datetime.now(UTC)) < timedelta(minutes=5)
    assert written.TimezoneOffsetFromUTC == "+0000"


def test_a_report_needs_an_image_with_identifiers() -> None:
    array = io.BytesIO()
    np.save(array, np.zeros((8, 9), np.uint8))
    assert write_report(read_upload(array.getvalue(), Limits())[0], ANSWER, 0) is None
    assert write_report(pictures(StudyInstanceUID=None)[0], ANSWER, 0) is None
    assert write_report(pictures(StudyInstanceUID="1.02.x")[0], ANSWER, 0) is None


@pytest.mark.parametrize("uid", ["1.2.3", "1.2.840.10008.5.1.4.1.1.6"])
def test_an_image_of_a_private_or_retired_class_has_no_report_and_no_error(uid: str) -> None:
    assert write_report(pictures(SOPClassUID=uid)[0], ANSWER, 0) is None


def test_every_class_that_the_node_receives_can_be_reported() -> None:
    for uid in image_classes():
        assert reported_image(pictures(SOPClassUID=uid)[0], ANSWER, 0) is not None
