"""Stand-in of CBIS-DDSM as TCIA publishes it."""

import csv
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from mergestream.data.datasets.mammo import FINDINGS, PARTS, table_name
from mergestream.data.datasets.standins.drawing import TABLES, Content, grey, write_files
from mergestream.data.datasets.table_files import needed_library

MANIFEST = "manifest-ZkhPvrLo5216730872708713142"
SERIES_COLUMNS = ["Series UID", "Subject ID", "Series Description", "Number of Images", "File Location"]
PATHOLOGY = ("BENIGN", "BENIGN_WITHOUT_CALLBACK", "MALIGNANT")
FULL, CROP = (30, 22), (14, 12)  # height, width


@dataclass(frozen=True)
class Lesion:
    """What the tables say of one lesion, and a number that draws it."""

    finding: str
    part: str
    patient: int
    view: str
    lesion: int
    number: int
    density: int
    pathology: str
    mammogram: str  # Subject ID
    subject: str

    def pixels(self, shape: tuple[int, int]) -> np.ndarray:
        """uint8 [H,W]."""
        label = int(self.pathology == "MALIGNANT")
        return grey(f"{self.finding}{self.view}", label, self.number, max(shape))[: shape[0], : shape[1]]


def lesions(finding: str) -> Iterator[Lesion]:
    """Eight patients per finding, two views each; two patients have a second lesion, two are the test set."""
    for patient, view in product(range(8), ("CC", "MLO")):
        part = "test" if patient % 4 == 3 else "train"
        mammogram = f"{finding.capitalize()}-{PARTS[part]}_P_{patient:05d}_LEFT_{view}"
        for lesion in (1, 2) if patient in (1, 5) else (1,):
            # The second lesion of an image is always benign: the image itself may be malignant.
            pathology = "BENIGN" if lesion > 1 else PATHOLOGY[2 * (patient // 4 % 2) or patient % 2]
            fields = (finding, part, patient, view, lesion, 10 * patient + lesion, patient % 4 + 1, pathology)
            yield Lesion(*fields, mammogram, f"{mammogram}_{lesion}")


def write_mammo(folder: Path) -> None:
    """TCIA's layout, with the downloader's folders of UIDs."""
    series, files = [SERIES_COLUMNS], dict[str, Content]()
    write_tables(folder)
    for lesion in (each for finding in FINDINGS for each in lesions(finding)):
        for subject, kind, images in images_of(lesion):
            place = f"CBIS-DDSM/{subject}/{uid(subject, f'study of {kind}')}/{uid(subject, kind)}"
            for number, pixels in enumerate(images, start=1):
                files[f"{MANIFEST}/{place}/1-{number}.dcm"] = _dicom(pixels, subject, kind)
            series.append([uid(subject, kind), subject, kind, str(len(images)), f"./{place}"])
    write_files(folder, files)
    write_csv(folder / MANIFEST / "metadata.csv", series)


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
        head = TABLES["mammo"]["columns"].format(*TABLES["mammo"][finding].split(",")).split(",")
        for part in PARTS:
            rows = [_table_row(each) for each in lesions(finding) if each.part == part]
            write_csv(folder / table_name(finding, part), [head, *rows])


def _table_row(each: Lesion) -> list[str]:
    kind = "mass" if each.finding == "mass" else "calcification"
    whole, own = (f"{name}/{uid(name, 'study')}/{uid(name, 'series')}" for name in (each.mammogram, each.subject))
    paths = [f"{whole}/000000.dcm", f"{own}/000000.dcm", f"{own}/000001.dcm\n"]
    fields = [f"P_{each.patient:05d}", str(each.density), "LEFT", each.view, str(each.lesion), kind]
    return [*fields, "OVAL", "OBSCURED", "4", each.pathology, "3", *paths]


def write_csv(path: Path, rows: list[list[str]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_files(path.parent, {path.name: text.getvalue().encode()})


def _dicom(pixels: np.ndarray, subject: str, kind: str) -> bytes:
    pydicom = needed_library("pydicom", "Writing DICOM")
    file, buffer = pydicom.Dataset(), io.BytesIO()
    file.file_meta = pydicom.dataset.FileMetaDataset()
    file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    file.SOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    file.SOPInstanceUID = f"{uid(subject, kind)}.{zlib.crc32(pixels.tobytes())}"
    file.Modality, file.SeriesDescription, file.PatientID = "MG", kind, subject
    file.set_pixel_data(pixels, "MONOCHROME2", 8 * pixels.itemsize, generate_instance_uid=False)
    file.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()
