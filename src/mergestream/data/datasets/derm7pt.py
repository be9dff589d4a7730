"""Derm7pt (Kawahara et al. 2018): each lesion by a dermoscope and by a clinical camera."""

from collections.abc import Mapping
from pathlib import PurePosixPath

from mergestream.data.datasets.index import LeftOut, Sample
from mergestream.data.datasets.medimeta import MedimetaImage, find_medimeta, read_medimeta
from mergestream.data.datasets.roots import Root, by_stem
from mergestream.data.datasets.skin import BENIGN, MELANOMA, SkinSet, SkinTable, binary_label, find_table
from mergestream.runtime.errors import UnknownNameError

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
