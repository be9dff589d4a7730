"""Stand-in of CBIS-DDSM as TCIA publishes it."""

import csv
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mergestream.data.datasets.cbis_ddsm import FINDINGS, PARTS, table_name
from mergestream.data.datasets.standins.fake_organs import grey
from mergestream.runtime.errors import DataError

MANIFEST = "manifest-ZkhPvrLo5216730872708713142"
COLUMNS = {
    "mass": ("breast_density", "mass shape", "mass margins"),
    "calc": ("breast density", "calc type", "calc distribution"),
}
SERIES_COLUMNS = ["Series UID", "Subject ID", "Series Description", "Number of Images", "File Location"]
PATHOLOGY = ("BENIGN", "BENIGN_WITHOUT_CALLBACK", "MALIGNANT")
FULL, CROP = (30, 22), (14, 12)  # height, width


@dataclass(frozen=True)
class Lesion:
    """What the tables say of one lesion, and a number that draws it."""

    finding: str
    part: str
    patient: int
    side: str
    view: str
    lesion: int
    number: int

    @property
    def mammogram(self) -> str:
        return f"{self.finding.capitalize()}-{PARTS[self.part]}_P_{self.patient:05d}_{self.side}_{self.view}"

    @property
    def subject(self) -> str:
        return f"{self.mammogram}_{self.lesion}"

    @property
    def density(self) -> int:
        return self.patient % 4 + 1

    @property
    def pathology(self) -> str:
        """The second lesion of an image is always benign: the image itself may be malignant."""
        return "BENIGN" if self.lesion > 1 else PATHOLOGY[2 * (self.patient // 4 % 2) or self.patient % 2]

    def pixels(self, shape: tuple[int, int]) -> np.ndarray:
        """uint8 [H,W]."""
        label = int(self.pathology == "MALIGNANT")
        return grey(f"{self.finding}{self.view}", label, self.number, max(shape))[: shape[0], : shape[1]]


def lesions(finding: str) -> list[Lesion]:
    """Eight patients per finding, two views each; two patients have a second lesion, two are the test set."""
    drawn = []
    for patient in range(8):
        part = "test" if patient % 4 == 3 else "train"
        for view in ("CC", "MLO"):
            for lesion in (1, 2) if patient in (1, 5) else (1,):
                drawn.append(Lesion(finding, part, patient, "LEFT", view, lesion, 10 * patient + lesion))
    return drawn


def write_mammo(folder: Path) -> None:
    """TCIA's layout, with the downloader's folders of UIDs."""
    inside, series = folder / MANIFEST, []
    write_tables(folder)
    for lesion in (each for finding in FINDINGS for each in lesions(finding)):
        for subject, kind, files in images_of(lesion):
            place = Path("CBIS-DDSM", subject, uid(subject, f"study of {kind}"), uid(subject, kind))
            for number, pixels in enumerate(files, start=1):
                _write_dicom(inside / place / f"1-{number}.dcm", pixels, subject, kind)
            series.append([uid(subject, kind), subject, kind, str(len(files)), f"./{place.as_posix()}"])
    write_csv(inside / "metadata.csv", [SERIES_COLUMNS, *series])


def uid(subject: str, kind: str) -> str:
    return f"1.3.6.1.4.1.9590.100.1.2.{zlib.crc32(f'{subject}/{kind}'.encode())}"


def images_of(lesion: Lesion) -> Iterator[tuple[str, str, list[np.ndarray]]]:
    """Subject ID, description and files of a lesion's series. Crop and mask share one, in either order, or have two."""
    full, crop = (lesion.pixels(shape).astype(np.uint16) * 257 for shape in (FULL, CROP))
    mask = np.zeros(FULL, dtype=np.uint8)
    mask[8:22, 5:17] = 255
    if lesion.lesion == 1:
        yield lesion.mammogram, "full mammogram images", [full]
    if lesion.patient == 6:
        yield lesion.subject, "cropped images", [crop]
        yield lesion.subject, "ROI mask images", [mask]
    else:
        yield lesion.subject, "ROI mask images", [mask, crop] if lesion.patient % 2 else [crop, mask]


def write_tables(folder: Path) -> None:
    """Paths end with a line end inside their quotes, and always call the crop 000000.dcm, which it often is not."""
    for finding in FINDINGS:
        density, shape, margins = COLUMNS[finding]
        fields = ["patient_id", density, "left or right breast", "image view", "abnormality id", "abnormality type"]
        paths = ["image file path", "cropped image file path", "ROI mask file path"]
        head = [*fields, shape, margins, "assessment", "pathology", "subtlety", *paths]
        for part in PARTS:
            rows = [_table_row(each) for each in lesions(finding) if each.part == part]
            write_csv(folder / table_name(finding, part), [head, *rows])


def _table_row(each: Lesion) -> list[str]:
    kind = "mass" if each.finding == "mass" else "calcification"
    places = [
        f"{subject}/{uid(subject, 'study')}/{uid(subject, 'series')}" for subject in (each.mammogram, each.subject)
    ]
    paths = [f"{places[0]}/000000.dcm", f"{places[1]}/000000.dcm", f"{places[1]}/000001.dcm\n"]
    fields = [f"P_{each.patient:05d}", str(each.density), each.side, each.view, str(each.lesion), kind]
    return [*fields, "OVAL", "OBSCURED", "4", each.pathology, "3", *paths]


def write_csv(path: Path, rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def _write_dicom(path: Path, pixels: np.ndarray, subject: str, kind: str) -> None:
    try:
        from pydicom.dataset import Dataset, FileMetaDataset
        from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage
    except ImportError as error:
        raise DataError("Writing DICOM needs pydicom: pip install 'mergestream[data]'.") from error
    file, bits = Dataset(), 8 * pixels.itemsize
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    own = f"{uid(subject, kind)}.{zlib.crc32(pixels.tobytes())}"
    fields: dict[str, Any] = {
        "SOPClassUID": SecondaryCaptureImageStorage,
        "SOPInstanceUID": own,
        "Modality": "MG",
        "SeriesDescription": kind,
        "PatientID": subject,
        "PhotometricInterpretation": "MONOCHROME2",
        "SamplesPerPixel": 1,
        "Rows": pixels.shape[0],
        "Columns": pixels.shape[1],
        "BitsAllocated": bits,
        "BitsStored": bits,
        "HighBit": bits - 1,
        "PixelRepresentation": 0,
    }
    for name, value in fields.items():
        setattr(file, name, value)
    file.add_new(0x7FE00010, "OB" if bits == 8 else "OW", pixels.tobytes())
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path, enforce_file_format=True)
