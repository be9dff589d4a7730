"""Mammography: lesions of CBIS-DDSM (Lee et al. 2017), benign or malignant, from TCIA, Kaggle or MedIMeta.

TCIA (DICOM) and Kaggle (JPEG) have case tables, and files by Subject ID. A Subject ID names a mammogram,
Mass-Training_P_00001_LEFT_CC, or with a number after it one lesion in it. A lesion has two files, crop and mask. The
tables' paths fit neither copy and swap the two in many rows: only Subject IDs are used.
"""

import io
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import PurePosixPath

from PIL import Image

from mergestream.data.datasets.decoding import read_pixels
from mergestream.data.datasets.index import CARDS, Index, LeftOut, Sample
from mergestream.data.datasets.medimeta import find_medimeta, read_medimeta
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.table_files import needed_library, read_csv
from mergestream.data.intake.shades import stretched
from mergestream.runtime.errors import DataError
from mergestream.runtime.option_checks import one_of

CARD = CARDS["mammo"]
FINDINGS, PARTS = ("mass", "calc"), {"train": "Training", "test": "Test"}
PUBLISHED = {"mass": 1696, "calc": 1872}  # lesions
# Kinds of domain: the name of a sample's domain, and all such names.
NAMES = {"finding_view": "{finding}_{view}", "finding": "{finding}", "density": "density_{density}"}
DOMAINS = {
    "finding_view": ("mass_cc", "mass_mlo", "calc_cc", "calc_mlo"),
    "finding": FINDINGS,
    "density": ("density_1", "density_2", "density_3", "density_4"),
}
MALIGNANT = {"MALIGNANT": True, "BENIGN": False, "BENIGN_WITHOUT_CALLBACK": False}
SUBJECT = re.compile(r"(Mass|Calc)-(Training|Test)_P_\d+_(LEFT|RIGHT)_(CC|MLO)(_\d+)?")
HEADER = 1 << 16  # bytes that surely hold an image's size
COLUMNS = ("patient id", "breast density", "left or right breast", "image view", "abnormality id", "pathology")


def read(root: Root, *, domain: str | None = None, image: str = "crop") -> Index:
    if domain is not None:
        one_of("domain", domain, tuple(DOMAINS))
    one_of("image", image, ("crop", "full"))
    packed = [name for name in FINDINGS if find_medimeta(root, f"mammo_{name}")]
    tables = [name for name in FINDINGS for part in PARTS if root.named(table_name(name, part))]
    if packed and tables:
        raise DataError(f"{root.location} holds both CBIS-DDSM and MedIMeta's copy of it. Give the folder of one.")
    if packed:
        return _from_medimeta(root, domain, image)
    if tables:
        return _from_cbis_ddsm(root, domain or "finding_view", image)
    expected = f"{table_name('mass', 'train')} and the images, or MedIMeta's mammo_mass and mammo_calc"
    raise root.refused("mammo", expected)


def _from_medimeta(root: Root, domain: str | None, image: str) -> Index:
    if image != "crop":
        raise DataError(f"{root.location} is MedIMeta's copy, which has crops only: image='crop'.")
    samples = []
    for finding in FINDINGS:
        for each in read_medimeta(root, f"mammo_{finding}", "pathology", classes=CARD.classes):
            of = {name.lower().replace(" ", "_"): value for name, value in each.annotations.items()}
            of = _subgroups(of.get("breast_density", ""), finding, of.get("image_view", ""))
            samples.append(replace(each.sample, group=each.subject, subgroups=of))
    viewed = all(sample.subgroups["view"] != "unknown" for sample in samples)
    return _placed(Index(CARD, samples), domain or ("finding_view" if viewed else "finding"))


def _from_cbis_ddsm(root: Root, domain: str, image: str) -> Index:
    lesions, files = read_lesions(root), files_by_subject(root)
    samples, missing, left_out = [], [], _unused(lesions, files, image)
    images: dict[str, list[Sample]] = {}
    for lesion in lesions:
        images.setdefault(lesion.id if image == "crop" else _mammogram(lesion.id), []).append(lesion)
    for subject, shown in images.items():
        there = files.get(subject, [])
        file = crop_of(root, there) if image == "crop" else next(iter(there), None)
        if file is None:
            missing.append(f"{subject} ({image})")
            continue
        samples.append(replace(shown[0], id=subject, file=file, label=max(each.label for each in shown)))
        if image == "full":
            left_out += [LeftOut(other, f"a second file of {subject}") for other in there if other != file]
    card = replace(CARD, parts=tuple(PARTS), total=CARD.total if image == "crop" else None)
    return _placed(Index(card, samples, left_out, missing), domain)


def _unused(lesions: list[Sample], files: dict[str, list[str]], image: str) -> list[LeftOut]:
    """Files that are not images of a lesion, one line per kind since there are thousands."""
    crops, mammograms = {each.id for each in lesions}, {_mammogram(each.id) for each in lesions}
    unnamed = [subject for subject in files if subject not in crops | mammograms]
    what, others, option = ("mammograms", mammograms, "full") if image == "crop" else ("lesions", crops, "crop")
    unused = []
    if there := len(others & files.keys()):
        unused.append(LeftOut(f"{there} {what}", f"image='{option}' reads them"))
    if unnamed:
        unused.append(LeftOut(f"{len(unnamed)} other subjects", f"no case table names them, such as {unnamed[0]}"))
    return unused


def _placed(index: Index, domain: str) -> Index:
    """Put samples into their domains; those without one, such as a density outside 1 to 4, are left out."""
    placed = [replace(sample, domain=NAMES[domain].format(**sample.subgroups)) for sample in index.samples]
    used = [sample for sample in placed if sample.domain in DOMAINS[domain]]
    strangers = [LeftOut(s.file, f"its {domain} is {s.domain}") for s in placed if s.domain not in DOMAINS[domain]]
    domains = tuple(name for name in DOMAINS[domain] if any(sample.domain == name for sample in used))
    counts = {name: PUBLISHED[name] for name in domains} if domain == "finding" and index.card.total else {}
    card = replace(index.card, domains=domains, counts=counts)
    return replace(index, card=card, samples=used, left_out=(*index.left_out, *strangers))


def table_name(finding: str, part: str) -> str:
    return f"{finding}_case_description_{part}_set.csv"


def _mammogram(lesion: str) -> str:
    """The Subject ID of a lesion's mammogram."""
    return lesion.rpartition("_")[0]


def _subgroups(density: str, finding: str, view: str) -> dict[str, str]:
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
    label, of = int(MALIGNANT[row["pathology"].upper()]), _subgroups(row["breast density"], finding, view)
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
