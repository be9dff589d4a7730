"""DICOM files that tests write themselves, with a patient in them who must turn up nowhere."""

import io
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.sequence import Sequence
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage

SECRET = "VERTRAULICH"
UIDS = {
    "SOPClassUID": SecondaryCaptureImageStorage,
    "SOPInstanceUID": "1.2.826.0.1.3680043.8.498.1",
    "StudyInstanceUID": "1.2.826.0.1.3680043.8.498.2",
    "SeriesInstanceUID": "1.2.826.0.1.3680043.8.498.3",
}


def item(**elements: Any) -> Dataset:
    made = Dataset()
    for keyword, value in elements.items():
        setattr(made, keyword, value)
    return made


def dataset(pixels: np.ndarray | bytes, syntax: str = ExplicitVRLittleEndian, **elements: Any) -> Dataset:
    """An image of [H,W] or [H,W,3]; any element may be given, and None takes it out."""
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = syntax
    made.PatientName, made.PatientID = f"{SECRET}^Name", SECRET
    known: dict[str, Any] = {**UIDS, "AccessionNumber": SECRET, "PixelRepresentation": 0}
    if isinstance(pixels, np.ndarray):
        colour = pixels.ndim == 3 and pixels.shape[-1] == 3
        bits = pixels.dtype.itemsize * 8
        known |= {
            "Rows": pixels.shape[0],
            "Columns": pixels.shape[1],
            "SamplesPerPixel": 3 if colour else 1,
            "PhotometricInterpretation": "RGB" if colour else "MONOCHROME2",
            "BitsAllocated": bits,
            "BitsStored": bits,
            "PixelRepresentation": int(pixels.dtype.kind == "i"),
        }
        if colour:
            known["PlanarConfiguration"] = 0
    known |= {"HighBit": elements.get("BitsStored", known.get("BitsStored", 1)) - 1} | elements
    for keyword, value in known.items():
        if value is not None:
            setattr(made, keyword, Sequence(value) if keyword.endswith("Sequence") else value)
    data = pixels.tobytes() if isinstance(pixels, np.ndarray) else pixels
    made.PixelData = data + b"\0" * (len(data) % 2)
    made["PixelData"].VR = "OB" if known.get("BitsAllocated") == 8 else "OW"
    return made


def written(made: Dataset) -> bytes:
    file = io.BytesIO()
    made.save_as(file, enforce_file_format=True)
    return file.getvalue()


def dicom(pixels: np.ndarray | bytes, syntax: str = ExplicitVRLittleEndian, **elements: Any) -> bytes:
    return written(dataset(pixels, syntax, **elements))


def compressed(frames: list[bytes], syntax: str, pixels: np.ndarray, **elements: Any) -> bytes:
    """Frames that are compressed already, under the header of `pixels`."""
    made = dataset(pixels, syntax, **elements)
    made.PixelData = encapsulate(frames)
    made["PixelData"].VR, made["PixelData"].is_undefined_length = "OB", True
    return written(made)
