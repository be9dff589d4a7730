"""PH2 (Mendonça et al. 2013): 200 dermoscopic images of one hospital, 40 of them melanomas."""

import re
from pathlib import PurePosixPath

from mergestream.data.datasets.csv_files import decode_text
from mergestream.data.datasets.index import Sample
from mergestream.data.datasets.roots import Root, by_stem
from mergestream.data.datasets.skin import BENIGN, MELANOMA, SkinSet, binary_label, find_table
from mergestream.data.datasets.spreadsheets import read_sheet
from mergestream.runtime.errors import DataError

IMAGE = re.compile(r"IMD\d+", re.IGNORECASE)
DIAGNOSES = ("Common Nevus", "Atypical Nevus", "Melanoma")  # 0, 1 and 2 in the text file


def read_ph2(root: Root) -> SkinSet | None:
    """Read PH2 by PH2_dataset.txt, PH2_dataset.xlsx or ph2.csv, which agree; the first needs no library."""
    for name, labels_of in {"PH2_dataset.txt": _text_labels, "PH2_dataset.xlsx": _sheet_labels}.items():
        if paths := root.named(name):
            return _skin_set(root, paths[0], labels_of(root, paths[0]))
    table = find_table(root, "ph2.csv", ("image", "label"))
    if table is None:
        return None
    labels = {row["image"]: binary_label(row["label"], table.path, row["image"]) for row in table.rows}
    return _skin_set(root, table.path, labels)


def _skin_set(root: Root, table: str, labels: dict[str, int]) -> SkinSet:
    skin_set, files = SkinSet(table), _dermoscopic(root)
    for image, label in labels.items():
        if image.lower() in files:
            skin_set.samples.append(Sample(f"ph2/{image}", files[image.lower()], "ph2", label))
        else:
            skin_set.missing.append(f"{image}.bmp (of {table})")
    return skin_set


def _dermoscopic(root: Root) -> dict[str, str]:
    """The images by stem, without the masks of lesion and colours next to them."""
    named = [path for path in root.images if IMAGE.fullmatch(PurePosixPath(path).stem)]
    published = [path for path in named if PurePosixPath(path).parent.name.lower().endswith("_dermoscopic_image")]
    return by_stem(published or named)


def _text_labels(root: Root, path: str) -> dict[str, int]:
    """Rows are '|| IMD003 || histology || clinical diagnosis || ...', and a legend follows."""
    labels: dict[str, int] = {}
    for line in decode_text(root.read(path)).splitlines():
        cells = [cell.strip() for cell in line.split("||")]
        if len(cells) < 4 or not IMAGE.fullmatch(cells[1]):
            continue
        if cells[3] not in ("0", "1", "2"):
            raise DataError(f"{path} gives {cells[1]} the clinical diagnosis '{cells[3]}', none of 0, 1 and 2.")
        labels[cells[1]] = MELANOMA if cells[3] == "2" else BENIGN
    if not labels:
        raise DataError(f"{path} in {root.location} has no row such as '|| IMD003 ||  || 0 ||'.")
    return labels


def _sheet_labels(root: Root, path: str) -> dict[str, int]:
    labels: dict[str, int] = {}
    for row in read_sheet(root, path, ("Image Name", *DIAGNOSES)):
        if not IMAGE.fullmatch(row["Image Name"]):
            continue
        marked = [diagnosis for diagnosis in DIAGNOSES if row[diagnosis].upper() == "X"]
        if len(marked) != 1:
            raise DataError(f"{path} marks {row['Image Name']} as {marked or 'nothing'}; one diagnosis was expected.")
        labels[row["Image Name"]] = MELANOMA if marked == ["Melanoma"] else BENIGN
    return labels
