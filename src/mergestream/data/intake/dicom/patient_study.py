"""Elements about patient and study that a report takes over from its image. Read in the child process, never logged."""

from mergestream.data.intake.dicom.header import read_header
from mergestream.data.intake.limits import Limits

# Keyword and value representation, in the order of `header_texts`.
ELEMENTS = {
    "PatientName": "PN",
    "PatientID": "LO",
    "IssuerOfPatientID": "LO",
    "PatientBirthDate": "DA",
    "PatientSex": "CS",
    "StudyDate": "DA",
    "StudyTime": "TM",
    "AccessionNumber": "SH",
    "StudyID": "SH",
    "StudyDescription": "LO",
    "ReferringPhysicianName": "PN",
    "InstanceNumber": "IS",
}
LONGEST = 200  # a name of three groups; other elements are shorter


def header_texts(data: bytes, limits: Limits) -> list[str]:
    """The text of each element, decoded by the file's character set; empty where it has none."""
    dataset = read_header(data, limits).dataset
    return [str(dataset.get(keyword) or "").strip(" \0")[:LONGEST] for keyword in ELEMENTS]
