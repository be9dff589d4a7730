"""Patient and study of a received object, for the reports about it. Parsed in the bounded child process."""

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergestream.data.intake.decoder_pool import EncodedFile, pool_for
from mergestream.data.intake.decoder_process import HEADER
from mergestream.data.intake.dicom.header import ELEMENTS
from mergestream.data.intake.limits import Allowance, IntakeError, Limits

# Of these an invalid value would make the report invalid, too, and none of them says which patient it is about.
VALID = {"DA": r"\d{8}", "TM": r"\d{2}(\d{2}(\d{2}(\.\d{1,6})?)?)?", "CS": "[MFO]", "IS": r"[+-]?\d{1,9}"}
OPTIONAL = ("IssuerOfPatientID", "StudyDescription")
Texts = Mapping[str, str]  # by keyword
NOBODY: Texts = dict.fromkeys(ELEMENTS, "")


def read_texts(file: Path, limits: Limits) -> Texts:
    """Elements about patient and study of a DICOM file. IntakeError: it cannot be read any more."""
    with file.open("rb") as opened:
        data = opened.read(limits.file_bytes + 1)
    if len(data) > limits.file_bytes:
        raise IntakeError("too_large", "The received object is larger than the service's limit for files.")
    ((values, _),) = pool_for(limits).decode([EncodedFile(HEADER, data)], Allowance.of(limits))
    texts = dict(zip(ELEMENTS, values, strict=True))
    return {name: text if re.fullmatch(VALID.get(ELEMENTS[name], ".*"), text) else "" for name, text in texts.items()}


def set_texts(report: Any, texts: Texts) -> None:
    """Set a report's patient and study. Not through highdicom: it would quote an unusual name in a warning."""
    import pydicom
    from pydicom.datadict import tag_for_keyword
    from pydicom.dataelem import DataElement

    report.SpecificCharacterSet = "ISO_IR 192"
    for name, vr in ELEMENTS.items():
        tag = tag_for_keyword(name)
        if name != "InstanceNumber" and tag is not None and (texts[name] or name not in OPTIONAL):
            report[tag] = DataElement(tag, vr, texts[name], validation_mode=pydicom.config.IGNORE)


def derived_uid(*parts: Any) -> str:
    """A UID that follows from its parts, so that the same report made twice is one object to its receiver."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return f"2.25.{uuid.UUID(bytes=digest[:16], version=5).int}"
