"""CBIS-DDSM (Lee et al. 2017) from TCIA (DICOM) or Kaggle (JPEG): case tables, and files by Subject ID.

A Subject ID names a mammogram, Mass-Training_P_00001_LEFT_CC, or with a number after it one lesion in it. A lesion has
two files, crop and mask. The tables' paths fit neither copy and swap the two in many rows: only Subject IDs are used.
"""

import io
import re
from collections import defaultdict
from pathlib import PurePosixPath

from PIL import Image

from mergestream.data.datasets.arrays import needed_library
from mergestream.data.datasets.decoding import read_pixels
from mergestream.data.datasets.index import Sample
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.table_files import read_csv
from mergestream.data.intake.shades import stretched
from mergestream.runtime.errors import DataError

FINDINGS, PARTS = ("mass", "calc"), {"train": "Training", "test": "Test"}
MALIGNANT = {"MALIGNANT": True, "BENIGN": False, "BENIGN_WITHOUT_CALLBACK": False}
SUBJECT = re.compile(r"(Mass|Calc)-(Training|Test)_P_\d+_(LEFT|RIGHT)_(CC|MLO)(_\d+)?")
HEADER = 1 << 16  # bytes that surely hold an image's size
COLUMNS = ("patient id", "breast density", "left or right breast", "image view", "abnormality id", "pathology")


def table_name(finding: str, part: str) -> str:
    return f"{finding}_case_description_{part}_set.csv"


def mammogram(lesion: str) -> str:
    """The Subject ID of a lesion's mammogram."""
    return lesion.rpartition("_")[0]


def subgroups(density: str, finding: str, view: str) -> dict[str, str]:
    return {"density": density or "unknown", "finding": finding, "view": view.lower() or "unknown"}


def read_lesions(root: Root) -> list[Sample]:
    """Read all lesions, in the order of the tables; a finding has both or none. Files and domains are not set."""
    lesions: dict[str, Sample] = {}
    for finding in FINDINGS:
        for part in PARTS if any(root.named(table_name(finding, part)) for part in PARTS) else ():
            path = root.one(table_name(finding, part))
            for line, row in enumerate(_rows(root, path), start=2):
                lesion = _lesion(row, finding, part, f"Row {line} of {path}")
                if lesions.setdefault(lesion.id, lesion) is not lesion:
                    raise DataError(f"The case tables name {lesion.id} twice. Keep one row of it.")
    return list(lesions.values())


def _rows(root: Root, path: str) -> list[dict[str, str]]:
    """Rows with normalised column names: the mass tables say breast_density, the others breast density."""
    rows = [{name.lower().replace("_", " "): value for name, value in row.items()} for row in read_csv(root, path)]
    lacking = [name for name in COLUMNS if rows and name not in rows[0]]
    if lacking or not rows:
        raise DataError(f"{path} in {root.location} lacks {f'the column {lacking[0]}' if rows else 'rows'}.")
    return rows


def _lesion(row: dict[str, str], finding: str, part: str, where: str) -> Sample:
    patient, side, view = row["patient id"], row["left or right breast"].upper(), row["image view"].upper()
    lesion = f"{finding.capitalize()}-{PARTS[part]}_{patient}_{side}_{view}_{row['abnormality id']}"
    if not SUBJECT.fullmatch(lesion) or row["pathology"].upper() not in MALIGNANT:
        raise DataError(
            f"{where} is not a lesion of CBIS-DDSM: patient, side, view and number give '{lesion}', "
            f"and its pathology is '{row['pathology']}'."
        )
    label, of = int(MALIGNANT[row["pathology"].upper()]), subgroups(row["breast density"], finding, view)
    return Sample(lesion, "", "", label, group=patient, part=part, subgroups=of)


def files_by_subject(root: Root) -> dict[str, list[str]]:
    """Image files by Subject ID, from folder names, metadata.csv or Kaggle's dicom_info.csv.

    A file without a subject is listed under its own path.
    """
    files = defaultdict[str, list[str]](list)
    pairs = _jpegs(root) if root.named("dicom_info.csv") else _dicoms(root)
    for subject, file in pairs:
        files[subject].append(file)
    return dict(files)


def _dicoms(root: Root) -> list[tuple[str, str]]:
    """Pairs of Subject ID and file; the ID is the name of an outer folder, or in metadata.csv."""
    tables = [read_csv(root, path, ("Series UID", "Subject ID")) for path in root.named("metadata.csv")]
    by_series = {row["Series UID"]: row["Subject ID"] for table in tables for row in table}
    pairs = []
    for file in root.files:
        if not file.lower().endswith(".dcm"):
            continue
        folders = PurePosixPath(file).parts[:-1]
        subjects = [name for name in folders if SUBJECT.fullmatch(name)]
        subjects = subjects or [by_series[name] for name in folders if name in by_series]
        pairs.append((subjects[-1] if subjects else file, file))
    return pairs


def _jpegs(root: Root) -> list[tuple[str, str]]:
    """Kaggle's table names jpeg/<series>/<file>, with folders before it that the download may not have."""
    there = {PurePosixPath(path).parts[-2:]: path for path in root.images}
    rows = read_csv(root, root.one("dicom_info.csv"), ("PatientID", "image_path"))
    subjects = {PurePosixPath(row["image_path"]).parts[-2:]: row["PatientID"] for row in rows}
    return [(subjects.get(file, path), path) for file, path in there.items()]


def crop_of(root: Root, files: list[str]) -> str | None:
    """The crop among a lesion's files: the smallest image or, if sizes are equal, the one that is not a mask."""
    areas = {file: _area(root, file) for file in files}
    if len(files) > 1 and None not in areas.values() and len(set(areas.values())) == len(files):
        return min(files, key=lambda file: areas[file] or 0)
    crops = [file for file in files if not _is_mask(root, file)]
    return min(crops, key=lambda file: (areas[file] or 0, file), default=None)


def _area(root: Root, file: str) -> int | None:
    """Number of pixels, from the header; None if it cannot be read."""
    try:
        head = io.BytesIO(root.read(file, first=HEADER))
        if file.lower().endswith(".dcm"):
            pydicom = needed_library("pydicom", "CBIS-DDSM is DICOM, which")
            header = pydicom.dcmread(head, stop_before_pixels=True, specific_tags=["Rows", "Columns"])
            return int(header.Rows) * int(header.Columns)
        with Image.open(head) as image:
            return image.width * image.height
    except DataError:
        raise
    except Exception:  # a damaged file is reported when it is decoded
        return None


def _is_mask(root: Root, file: str) -> bool:
    """Two grey values only, or nearly so: JPEG blurs the edge between them."""
    try:
        # Over its own range: a window may leave a dark crop few shades.
        grey = stretched(read_pixels(root.read(file), file)[0].numpy())
    except Exception:  # a damaged file is reported when it is decoded
        return False
    return float(((grey > 32) & (grey < 223)).mean()) < 0.01
