"""Answers as DICOM structured reports: read back, checked for what the standard requires, free of patients."""

import io
from datetime import UTC, datetime, timedelta

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset

from dicoms import SECRET, UIDS, dicom
from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import Limits
from mergestream.data.intake.pictures import Picture
from mergestream.serving.structured_report import NOTICE, write_report
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


def pictures(frames: int = 1, **elements: object) -> list[Picture]:
    pixels = np.random.default_rng(0).integers(0, 256, (frames * 8, 9), dtype=np.uint8)
    return read_upload(dicom(pixels, Rows=8, NumberOfFrames=frames, **elements), Limits())


def report(picture: Picture) -> Dataset:
    data = write_report(picture, ANSWER, 0)
    assert data is not None
    assert data[128:132] == b"DICM"
    return pydicom.dcmread(io.BytesIO(data))


def by_name(items: list[Dataset]) -> list[tuple[str, Dataset]]:
    return [(content.ConceptNameCodeSequence[0].CodeValue, content) for content in items]


def test_what_the_standard_requires_is_there() -> None:
    written = report(pictures()[0])
    assert all(written.get(keyword) not in (None, "") for keyword in TYPE_1)
    assert all(keyword in written for keyword in TYPE_2)
    assert written.SOPClassUID == written.file_meta.MediaStorageSOPClassUID == "1.2.840.10008.5.1.4.1.1.88.33"
    assert (written.Modality, written.ValueType, written.VerificationFlag) == ("SR", "CONTAINER", "UNVERIFIED")
    assert (written.CompletionFlag, written.ContinuityOfContent) == ("COMPLETE", "SEPARATE")


def test_every_item_has_a_relationship_a_type_and_a_coded_name_and_codes_mean_one_thing() -> None:
    written, meanings = report(pictures()[0]), dict[tuple[str, str], str]()

    def visit(content: Dataset, inside: bool) -> None:
        (code,) = content.ConceptNameCodeSequence
        key = (code.CodingSchemeDesignator, code.CodeValue)
        assert meanings.setdefault(key, code.CodeMeaning) == code.CodeMeaning
        assert len(code.CodeMeaning) <= 64
        assert len(code.CodeValue) <= 16
        assert ("RelationshipType" in content) == inside
        wanted = {"TEXT": "TextValue", "NUM": "MeasuredValueSequence", "IMAGE": "ReferencedSOPSequence"}
        assert wanted.get(content.ValueType, "ContentSequence") in content
        for nested in content.get("ContentSequence", []):
            visit(nested, inside=True)

    visit(written, inside=False)


def test_the_answer_can_be_read_back() -> None:
    content = by_name(report(pictures()[0]).ContentSequence)
    texts = {name: part.TextValue for name, part in content if part.ValueType == "TEXT"}
    assert texts["predicted"] == ANSWER.predictions[0]
    assert (texts["pool"], texts["model"], texts["notice"]) == (ANSWER.pool_sha256, ANSWER.weights_sha256, NOTICE)
    probabilities = dict(zip(ANSWER.classes, ANSWER.probabilities[0], strict=True))
    for kind, numbers in (("class", probabilities), ("expert", ANSWER.encoder_coefficients)):
        found = {}
        for name, part in content:
            if name == kind:
                text, number = part.ContentSequence
                (measured,) = number.MeasuredValueSequence
                assert measured.MeasurementUnitsCodeSequence[0].CodingSchemeDesignator == "UCUM"
                found[text.TextValue] = float(measured.NumericValue)
        assert found == pytest.approx(dict(numbers), rel=1e-9)


def test_the_image_and_the_frame_are_referred_to() -> None:
    one, (_, second) = pictures()[0], pictures(frames=2)
    for picture in (one, second):
        written = report(picture)
        (study,) = written.CurrentRequestedProcedureEvidenceSequence
        (series,) = study.ReferencedSeriesSequence
        (evidence,) = series.ReferencedSOPSequence
        image = dict(by_name(written.ContentSequence))["image"].ReferencedSOPSequence[0]
        assert written.StudyInstanceUID == study.StudyInstanceUID == UIDS["StudyInstanceUID"]
        assert series.SeriesInstanceUID == UIDS["SeriesInstanceUID"] != written.SeriesInstanceUID
        for reference in (evidence, image):
            assert reference.ReferencedSOPClassUID == UIDS["SOPClassUID"]
            assert reference.ReferencedSOPInstanceUID == UIDS["SOPInstanceUID"] != written.SOPInstanceUID
        assert image.get("ReferencedFrameNumber") == picture.frame


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
