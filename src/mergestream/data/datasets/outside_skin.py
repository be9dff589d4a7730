"""The skin data sets outside ISIC: PH2, PAD-UFES-20 and Derm7pt."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath

from mergestream.data.datasets.index import LeftOut, Sample
from mergestream.data.datasets.medimeta import find_medimeta, read_medimeta
from mergestream.data.datasets.roots import Root, by_stem
from mergestream.data.datasets.table_files import Rows, decode_text, read_csv
from mergestream.runtime.errors import DataError

BENIGN, MELANOMA = 0, 1


@dataclass
class SkinSet:
    """Samples of one set, and what else its table names. `as_published`: the published counts are of this list."""

    table: str
    samples: list[Sample] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    missing_parts: dict[str, str] = field(default_factory=dict)  # the publisher's split of each missing file
    as_published: bool = True

    def add(self, domain: str, image: str, file: str | None, label: int, group: str = "") -> None:
        """Add an image, or note that its file is missing."""
        if file is None:
            self.missing.append(f"{image} (of {self.table})")
        else:
            stem = PurePosixPath(image).stem
            self.samples.append(Sample(f"{domain}/{stem}", file, domain, label, group=group or None))


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


def read_ph2(root: Root) -> SkinSet | None:
    """Read PH2 by PH2_dataset.txt: rows '|| IMD003 || histology || clinical diagnosis || ...', and a legend."""
    named = [path for path in root.images if PH2_IMAGE.fullmatch(PurePosixPath(path).stem)]
    # Next to the images lie masks of the lesion and of its colours.
    published = [path for path in named if PurePosixPath(path).parent.name.lower().endswith("_dermoscopic_image")]
    for path in root.named("PH2_dataset.txt")[:1]:
        skin_set, files = SkinSet(path), by_stem(published or named)
        for line in decode_text(root.read(path)).splitlines():
            cells = [cell.strip() for cell in line.split("||")]
            if len(cells) < 4 or not PH2_IMAGE.fullmatch(cells[1]):
                continue
            if cells[3] not in ("0", "1", "2"):
                raise DataError(f"{path} gives {cells[1]} the clinical diagnosis '{cells[3]}', none of 0, 1 and 2.")
            skin_set.add("ph2", cells[1], files.get(cells[1].lower()), MELANOMA if cells[3] == "2" else BENIGN)
        if not skin_set.samples and not skin_set.missing:
            raise DataError(f"{path} in {root.location} has no row such as '|| IMD003 ||  || 0 ||'.")
        return skin_set
    return None


# --- PAD-UFES-20: lesions photographed with smartphones (Pacheco et al. 2020) -------------------------------

PAD_LABELS = {"NEV": BENIGN, "SEK": BENIGN, "MEL": MELANOMA}
CARCINOMAS = {"ACK": "actinic keratosis", "BCC": "basal cell carcinoma", "SCC": "squamous cell carcinoma"}


def read_pad_ufes(root: Root) -> SkinSet | None:
    """Read nevi, seborrhoeic keratoses and melanomas: 244, 235 and 52. The rest is left out, as in EPVT."""
    table = find_table(root, "metadata.csv", ("patient_id", "diagnostic", "img_id"))
    if table is None:
        return None
    skin_set = SkinSet(table.path)
    files = by_stem(path for path in root.images if PurePosixPath(path).name.upper().startswith("PAT_"))
    for row in table.rows:
        image, diagnosis = row["img_id"], row["diagnostic"].upper()
        file = files.get(PurePosixPath(image).stem.lower())
        if diagnosis in CARCINOMAS:
            skin_set.left_out.append(LeftOut(file or image, f"{CARCINOMAS[diagnosis]}, which EPVT leaves out"))
        elif diagnosis in PAD_LABELS:
            skin_set.add("pad_ufes", image, file, PAD_LABELS[diagnosis], row["patient_id"])
        else:
            diagnoses = ", ".join((*PAD_LABELS, *CARCINOMAS))
            raise DataError(f"{table.path} gives {image} the diagnosis '{diagnosis}', none of {diagnoses}.")
    return skin_set


# --- Derm7pt: each lesion by a dermoscope and by a clinical camera (Kawahara et al. 2018) -------------------

# The lists that Bissoto et al. published, and EPVT tests on: 872 and 839 images.
ATLAS = {"derm": "atlas-dermato-all.csv", "clinic": "atlas-clinical-all.csv"}
# MedIMeta's releases use either name for the same two sets.
MEDIMETA = {"derm": ("derm7pt_derm", "skinl_derm"), "clinic": ("derm7pt_clinic", "skinl_photo")}
TASKS = ("Diagnosis", "diagnosis", "Diagnosis grouped")  # as releases spell it


def read_derm7pt(root: Root, kind: str) -> SkinSet | None:
    """Read the dermoscopic ('derm') or clinical ('clinic') images; None if no known table is there."""
    meta = find_table(root, "meta.csv", ("case_num", "diagnosis", "derm", "clinic"))
    if meta:
        return _release(root, kind, meta, find_table(root, ATLAS[kind], ("image", "label")))
    for folder in MEDIMETA[kind]:
        if find_medimeta(root, folder) is not None:
            return _medimeta(root, kind, folder)
    return None


def label_of(diagnosis: str) -> int | None:
    """None for a basal cell carcinoma: the task is melanoma against benign."""
    if "basal cell" in diagnosis.lower():
        return None
    return MELANOMA if "melanoma" in diagnosis.lower() else BENIGN


def _release(root: Root, kind: str, meta: SkinTable, atlas: SkinTable | None) -> SkinSet:
    """Read the original release. meta.csv may spell paths in another case than the disk."""
    skin_set = SkinSet(meta.path, as_published=atlas is not None)
    home, files = PurePosixPath(meta.path).parent.parent / "images", {path.lower(): path for path in root.images}
    seen, listed = set[str](), atlas.rows if atlas else []
    labels = {row["image"].lower(): binary_label(row["label"], ATLAS[kind], row["image"]) for row in listed}
    for row in meta.rows:
        stem, path = PurePosixPath(row[kind]).stem.lower(), (home / row[kind]).as_posix()
        label = labels.get(stem) if atlas else label_of(row["diagnosis"])
        file = files.get(path.lower())
        if stem in seen:
            why = f"shows {row[kind]} a second time"
            skin_set.left_out.append(LeftOut(f"case {row['case_num']} of {meta.path}", why))
        elif label is None:
            skin_set.left_out.append(LeftOut(file or path, f"not in {atlas.path}" if atlas else row["diagnosis"]))
        else:
            skin_set.add(f"derm7pt_{kind}", path if file is None else stem, file, label, row["case_num"])
        seen.add(stem)
    skin_set.missing += [f"{stem} (of {atlas.path})" for stem in labels if stem not in seen and atlas]
    return skin_set


def _medimeta(root: Root, kind: str, folder: str) -> SkinSet:
    skin_set = SkinSet(f"{folder}/info.yaml", as_published=False)
    for entry in read_medimeta(root, folder, *TASKS):
        sample, label, domain = entry.sample, label_of(entry.label_name), f"derm7pt_{kind}"
        if label is None:
            what = sample.file if sample.array is None else f"{sample.id}.tiff"
            skin_set.left_out.append(LeftOut(what, entry.label_name))
            continue
        id_ = f"{domain}/{sample.id.rpartition('/')[2]}"
        skin_set.samples.append(replace(sample, id=id_, domain=domain, label=label, group=entry.subject, part=None))
    return skin_set


OUTSIDE: dict[str, Callable[[Root], SkinSet | None]] = {
    "derm7pt_derm": partial(read_derm7pt, kind="derm"),
    "derm7pt_clinic": partial(read_derm7pt, kind="clinic"),
    "ph2": read_ph2,
    "pad_ufes": read_pad_ufes,
}
