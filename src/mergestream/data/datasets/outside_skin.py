"""The skin data sets outside ISIC: PH2, PAD-UFES-20 and Derm7pt."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from mergestream.data.datasets.index import LeftOut, Sample
from mergestream.data.datasets.medimeta import MedimetaImage, find_medimeta, read_medimeta
from mergestream.data.datasets.roots import Root, by_stem
from mergestream.data.datasets.table_files import Rows, decode_text, read_csv, read_sheet
from mergestream.runtime.errors import DataError, UnknownNameError

CLASSES = ("benign", "melanoma")
BENIGN, MELANOMA = range(2)


@dataclass
class SkinSet:
    """Samples of one set, and what else its table names. `as_published`: the published counts are of this list."""

    table: str
    samples: list[Sample] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    as_published: bool = True


@dataclass(frozen=True)
class SkinTable:
    """A CSV file and its rows."""

    path: str
    rows: Rows


def find_table(root: Root, name: str, columns: tuple[str, ...]) -> SkinTable | None:
    """Find the CSV of this name with these columns. Identical copies are fine; two that differ are an error."""
    tables = [SkinTable(path, read_csv(root, path)) for path in root.named(name)]
    tables = [table for table in tables if table.rows and set(columns) <= set(table.rows[0])]
    for other in tables[1:]:
        if other.rows != tables[0].rows:
            raise DataError(f"{root.location} holds two different {name}: {tables[0].path}, {other.path}. Keep one.")
    return tables[0] if tables else None


def binary_label(text: str, table: str, image: str) -> int:
    """0 or 1, also as 0.0 or 1.0."""
    if text not in ("0", "1", "0.0", "1.0"):
        raise DataError(f"{table} gives {image} the label '{text}', neither 0 (benign) nor 1 (melanoma).")
    return int(float(text))


# --- PH2: 200 dermoscopic images of one hospital (Mendonça et al. 2013) -------------------------------------

PH2_IMAGE = re.compile(r"IMD\d+", re.IGNORECASE)
PH2_DIAGNOSES = ("Common Nevus", "Atypical Nevus", "Melanoma")  # 0, 1 and 2 in the text file


def read_ph2(root: Root) -> SkinSet | None:
    """Read PH2 by PH2_dataset.txt, PH2_dataset.xlsx or ph2.csv, which agree; the first needs no library."""
    for name, labels_of in {"PH2_dataset.txt": _text_labels, "PH2_dataset.xlsx": _sheet_labels}.items():
        if paths := root.named(name):
            return _ph2_set(root, paths[0], labels_of(root, paths[0]))
    table = find_table(root, "ph2.csv", ("image", "label"))
    if table is None:
        return None
    labels = {row["image"]: binary_label(row["label"], table.path, row["image"]) for row in table.rows}
    return _ph2_set(root, table.path, labels)


def _ph2_set(root: Root, table: str, labels: dict[str, int]) -> SkinSet:
    skin_set, files = SkinSet(table), _dermoscopic(root)
    for image, label in labels.items():
        if image.lower() in files:
            skin_set.samples.append(Sample(f"ph2/{image}", files[image.lower()], "ph2", label))
        else:
            skin_set.missing.append(f"{image}.bmp (of {table})")
    return skin_set


def _dermoscopic(root: Root) -> dict[str, str]:
    """The images by stem, without the masks of lesion and colours next to them."""
    named = [path for path in root.images if PH2_IMAGE.fullmatch(PurePosixPath(path).stem)]
    published = [path for path in named if PurePosixPath(path).parent.name.lower().endswith("_dermoscopic_image")]
    return by_stem(published or named)


def _text_labels(root: Root, path: str) -> dict[str, int]:
    """Rows are '|| IMD003 || histology || clinical diagnosis || ...', and a legend follows."""
    labels: dict[str, int] = {}
    for line in decode_text(root.read(path)).splitlines():
        cells = [cell.strip() for cell in line.split("||")]
        if len(cells) < 4 or not PH2_IMAGE.fullmatch(cells[1]):
            continue
        if cells[3] not in ("0", "1", "2"):
            raise DataError(f"{path} gives {cells[1]} the clinical diagnosis '{cells[3]}', none of 0, 1 and 2.")
        labels[cells[1]] = MELANOMA if cells[3] == "2" else BENIGN
    if not labels:
        raise DataError(f"{path} in {root.location} has no row such as '|| IMD003 ||  || 0 ||'.")
    return labels


def _sheet_labels(root: Root, path: str) -> dict[str, int]:
    labels: dict[str, int] = {}
    for row in read_sheet(root, path, ("Image Name", *PH2_DIAGNOSES)):
        if not PH2_IMAGE.fullmatch(row["Image Name"]):
            continue
        marked = [diagnosis for diagnosis in PH2_DIAGNOSES if row[diagnosis].upper() == "X"]
        if len(marked) != 1:
            raise DataError(f"{path} marks {row['Image Name']} as {marked or 'nothing'}; one diagnosis was expected.")
        labels[row["Image Name"]] = MELANOMA if marked == ["Melanoma"] else BENIGN
    return labels


# --- PAD-UFES-20: lesions photographed with smartphones (Pacheco et al. 2020) -------------------------------

# EPVT's tables: the release's own, and the list of Bissoto et al. without carcinomas.
PAD_TABLES = ("metadata.csv", "padufes-test-wocarc.csv")
PAD_COLUMNS = ("patient_id", "diagnostic", "img_id")
PAD_LABELS = {"NEV": BENIGN, "SEK": BENIGN, "MEL": MELANOMA}
CARCINOMAS = {"ACK": "actinic keratosis", "BCC": "basal cell carcinoma", "SCC": "squamous cell carcinoma"}


def read_pad_ufes(root: Root) -> SkinSet | None:
    """Read nevi, seborrhoeic keratoses and melanomas: 244, 235 and 52. The rest is left out, as in EPVT."""
    tables = (find_table(root, name, PAD_COLUMNS) for name in PAD_TABLES)
    table = next((table for table in tables if table), None)
    if table is None:
        return None
    skin_set = SkinSet(table.path)
    files = by_stem(path for path in root.images if PurePosixPath(path).name.upper().startswith("PAT_"))
    for row in table.rows:
        image, diagnosis = row["img_id"], row["diagnostic"].upper()
        stem = PurePosixPath(image).stem
        file = files.get(stem.lower())
        if diagnosis in CARCINOMAS:
            skin_set.left_out.append(LeftOut(file or image, f"{CARCINOMAS[diagnosis]}, which EPVT leaves out"))
        elif diagnosis not in PAD_LABELS:
            diagnoses = ", ".join((*PAD_LABELS, *CARCINOMAS))
            raise DataError(f"{table.path} gives {image} the diagnosis '{diagnosis}', none of {diagnoses}.")
        elif file is None:
            skin_set.missing.append(f"{image} (of {table.path})")
        else:
            group = row["patient_id"] or None
            skin_set.samples.append(Sample(f"pad_ufes/{stem}", file, "pad_ufes", PAD_LABELS[diagnosis], group=group))
    return skin_set


# --- Derm7pt: each lesion by a dermoscope and by a clinical camera (Kawahara et al. 2018) -------------------

# The lists that Bissoto et al. published, and EPVT tests on: 872 and 839 images.
ATLAS = {"derm": "atlas-dermato-all.csv", "clinic": "atlas-clinical-all.csv"}
# MedIMeta's releases use either name for the same two sets.
MEDIMETA = {"derm": ("derm7pt_derm", "skinl_derm"), "clinic": ("derm7pt_clinic", "skinl_photo")}
TASKS = ("Diagnosis", "diagnosis", "Diagnosis grouped")


def read_derm7pt(root: Root, kind: str) -> SkinSet | None:
    """Read the dermoscopic ('derm') or clinical ('clinic') images; None if no known table is there."""
    meta = find_table(root, "meta.csv", ("case_num", "diagnosis", "derm", "clinic"))
    atlas = find_table(root, ATLAS[kind], ("image", "label"))
    if meta:
        return _release(root, kind, meta, atlas)
    for folder in MEDIMETA[kind]:
        if find_medimeta(root, folder) is not None:
            return _medimeta(root, kind, folder)
    return _atlas(root, kind, atlas) if atlas else None


def label_of(diagnosis: str) -> int | None:
    """None for a basal cell carcinoma: the task is melanoma against benign."""
    if "basal cell" in diagnosis.lower():
        return None
    return MELANOMA if "melanoma" in diagnosis.lower() else BENIGN


def _release(root: Root, kind: str, meta: SkinTable, atlas: SkinTable | None) -> SkinSet:
    """Read the original release. meta.csv may spell paths in another case than the disk."""
    skin_set = SkinSet(meta.path, as_published=atlas is not None)
    home, files = PurePosixPath(meta.path).parent.parent / "images", {path.lower(): path for path in root.images}
    labels, seen = _atlas_labels(atlas) if atlas else {}, set[str]()
    for row in meta.rows:
        stem, path = PurePosixPath(row[kind]).stem.lower(), (home / row[kind]).as_posix()
        label = labels.get(stem) if atlas else label_of(row["diagnosis"])
        file = files.get(path.lower())
        if stem in seen:
            skin_set.left_out.append(
                LeftOut(f"case {row['case_num']} of {meta.path}", f"shows {row[kind]} a second time")
            )
        elif label is None:
            why = f"not in {atlas.path}" if atlas else row["diagnosis"]
            skin_set.left_out.append(LeftOut(file or path, why))
        elif file is None:
            skin_set.missing.append(path)
        else:
            skin_set.samples.append(_sample(kind, stem, file, label, row["case_num"]))
        seen.add(stem)
    skin_set.missing += [f"{stem} (of {atlas.path})" for stem in labels if stem not in seen and atlas]
    return skin_set


def _atlas(root: Root, kind: str, atlas: SkinTable) -> SkinSet:
    """Read the atlas list alone, with the images next to it."""
    skin_set, folder = SkinSet(atlas.path), str(PurePosixPath(atlas.path).parent)
    files = by_stem(path for path in root.images if path.startswith(f"{folder}/") or folder == ".")
    cases = {row["image"].lower(): row.get("case", "") for row in atlas.rows}
    for stem, label in _atlas_labels(atlas).items():
        if stem in files:
            skin_set.samples.append(_sample(kind, stem, files[stem], label, cases[stem]))
        else:
            skin_set.missing.append(f"{stem} (of {atlas.path})")
    return skin_set


def _medimeta(root: Root, kind: str, folder: str) -> SkinSet:
    skin_set = SkinSet(f"{folder}/info.yaml", as_published=False)
    for entry in _entries(root, folder):
        name = entry.names[entry.label]
        label = label_of(name)
        if label is None:
            skin_set.left_out.append(LeftOut(entry.file if entry.array is None else f"{entry.id}.tiff", name))
            continue
        id_ = f"derm7pt_{kind}/{entry.id.rpartition('/')[2]}"
        skin_set.samples.append(entry.sample(f"derm7pt_{kind}", entry.subject, id=id_, label=label, part=None))
    return skin_set


def _entries(root: Root, folder: str) -> list[MedimetaImage]:
    """Read the folder; releases spell the task differently."""
    for task in TASKS[:-1]:
        try:
            return read_medimeta(root, folder, task)
        except UnknownNameError:
            continue
    return read_medimeta(root, folder, TASKS[-1])


def _atlas_labels(atlas: SkinTable) -> Mapping[str, int]:
    return {row["image"].lower(): binary_label(row["label"], atlas.path, row["image"]) for row in atlas.rows}


def _sample(kind: str, stem: str, file: str, label: int, case: str) -> Sample:
    return Sample(f"derm7pt_{kind}/{stem}", file, f"derm7pt_{kind}", label, group=case or None)
