"""A stand-in of the ISIC root: images nested twice, EPVT's tables, and the four sets outside in their own layouts."""

import zipfile
from pathlib import Path

import numpy as np

from mergestream.data.datasets.isic import ARTEFACTS, CARD
from mergestream.data.datasets.standins.drawing import encoded, picture, write_picture, xlsx

SCORES = ",image,dark_corner,hair,gel_border,gel_bubble,ruler,ink,patches,vasc,label,label_string"
SIZES = {"train": 4, "val": 2, "test": 2}  # images per part, artefact and class
ATLAS = (
    "dataset,split,image,image_type,diagnosis,diagnosis_method,diagnosis_difficulty,diagnosis_confidence,"
    "lesion_thickness,lesion_diameter,lesion_location,age,sex,case,alias,semiduplicate,label"
)
META = (
    "case_num,diagnosis,seven_point_score,pigment_network,streaks,pigmentation,regression_structures,"
    "dots_and_globules,blue_whitish_veil,vascular_structures,level_of_diagnostic_difficulty,elevation,location,sex,"
    "management,clinic,derm,case_id,notes"
)
DIAGNOSES = ("basal cell carcinoma", "blue nevus", "clark nevus", "melanosis", "miscellaneous")
MELANOMAS = ("melanoma (in situ)", "melanoma (less than 0.76 mm)", "melanoma", "melanoma metastasis")
PAD = (
    "patient_id,lesion_id,smoke,drink,background_father,background_mother,age,pesticide,gender,skin_cancer_history,"
    "cancer_history,has_piped_water,has_sewage_system,fitspatrick,region,diameter_1,diameter_2,diagnostic,itch,grew,"
    "hurt,changed,bleed,elevation,img_id,biopsed"
)


def write_isic(folder: Path) -> None:
    _write_isic_2019(folder)
    _write_derm7pt(folder)
    _write_ph2(folder / "PH2Dataset")
    _write_pad_ufes(folder / "PAD-UFES-20")


def _write_isic_2019(folder: Path) -> None:
    inside = folder / "ISIC_2019_Training_Input" / "ISIC_2019_Training_Input"
    truth = ["image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK"]
    metadata = ["image,age_approx,anatom_site_general,lesion_id,sex"]
    tables: dict[str, list[str]] = {part: [SCORES] for part in SIZES}
    number = 0
    for part, each in SIZES.items():
        for domain in CARD.domains:
            for label in (0, 1):
                for n in range(each):
                    image = f"ISIC_{number:07d}"
                    write_picture(inside / f"{image}.jpg", picture(domain, label, number))
                    tables[part].append(f"{number},{image},{_scores(domain, n)},{label},{_word(label)}")
                    truth.append(f"{image},{label}.0,{1 - label}.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0")
                    # Two images per lesion; the last lesion of a class is not named.
                    lesion = "" if n == each - 1 else f"HAM_{number - n % 2:07d}"
                    metadata.append(f"{image},55.0,anterior torso,{lesion},female")
                    number += 1
    # Neither has a row in the artefact tables; a downsampled image is not the one of the shorter name.
    for image in ("ISIC_0000000_downsampled", "ISIC_0900001"):
        write_picture(inside / f"{image}.jpg", picture("carcinoma", 0, len(image)))
        truth.append(f"{image},0.0,0.0,1.0,0.0,0.0,0.0,0.0,0.0,0.0")
        metadata.append(f"{image},70.0,head/neck,,male")
    _write(folder / "ISIC_2019_Training_GroundTruth.csv", truth)
    _write(folder / "ISIC_2019_Training_Metadata.csv", metadata)
    for part, lines in tables.items():
        _write(folder / "data_proc" / f"{part}_bias_0_1.csv", lines)
    every = [SCORES, *(line for lines in tables.values() for line in lines[1:])]
    _write(folder / "data_proc" / "isic_inferred_wocarcinoma.csv", every)


def _scores(domain: str, number: int) -> str:
    """Scores that mean a domain; gel borders, ink, patches and vascular lesions do not count, however likely."""
    scores = dict.fromkeys(ARTEFACTS, 0.02 + 0.01 * number)
    if domain != "clean":
        scores[domain] = 0.7 + 0.05 * number
    loud = 0.99 if number % 2 else 0.0001
    order = ("dark_corner", "hair", None, "gel_bubble", "ruler", None, None, None)
    return ",".join(f"{scores[name]:.4f}" if name else str(loud) for name in order)


def _word(label: int) -> str:
    return "malignant" if label else "benign"


def _write_derm7pt(folder: Path) -> None:
    """One lesion in two pictures; letters of file names in any case, the lists in lower case."""
    release, lists = folder / "release_v0", folder / "datasets" / "edraAtlas"
    meta, rows = [META], {"dermoscopic": [ATLAS], "clinical": [ATLAS]}
    diagnoses = [*DIAGNOSES, *MELANOMAS]
    for case, diagnosis in enumerate(diagnoses, start=1):
        label = int("melanoma" in diagnosis)
        clinic, derm = f"NEL/NEL{23 + 2 * case:03d}.JPG", f"NEL/Nel{24 + 2 * case:03d}.jpg"
        for kind, name in (("clinical", clinic), ("dermoscopic", derm)):
            pixels = picture(f"derm7pt {kind}", label, case)
            path = release / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(pixels, ".jpg"))
            if diagnosis != "basal cell carcinoma":
                stem = Path(name).stem.lower()
                rows[kind].append(
                    f"edraAtlas,,{stem},{kind},1.1.5.,histopathology,low,high,,5.0,,25,male,1E{case},,,{label}"
                )
        meta.append(
            f"{case},{diagnosis},{label},absent,absent,absent,absent,absent,absent,absent,low,flat,back,male,"
            f"excision,{clinic},{derm},,"
        )
    _write(release / "meta" / "meta.csv", meta)
    for part, first, last in (("train", 0, 4), ("valid", 4, 6), ("test", 6, len(diagnoses))):
        _write(release / "meta" / f"{part}_indexes.csv", ["indexes", *map(str, range(first, last))])
    _write(lists / "atlas-dermato-all.csv", rows["dermoscopic"])
    _write(lists / "atlas-clinical-all.csv", rows["clinical"])


def _write_ph2(folder: Path) -> None:
    """A folder per image, with the masks of the lesion and of a colour."""
    text = [
        "||   Name || Histological Diagnosis || Clinical Diagnosis || Asymmetry | Pigment Network | Dots/Globules | "
        "Streaks | Regression Areas | Blue-Whitish Veil ||           Colors ||"
    ]
    sheet: list[list[str]] = [["PH2 Database"], *([] for _ in range(11))]
    sheet.append(["Image Name", "Histological Diagnosis", "Common Nevus", "Atypical Nevus", "Melanoma", "Asymmetry"])
    for number in range(6):
        diagnosis, image = number % 3, f"IMD{3 + 7 * number:03d}"
        inside = folder / "PH2 Dataset images" / image
        pixels = picture("ph2", int(diagnosis == 2), number)
        mask = np.where(pixels.mean(axis=-1, keepdims=True) > 90, 255, 0).astype(np.uint8).repeat(3, axis=-1)
        write_picture(inside / f"{image}_Dermoscopic_Image" / f"{image}.bmp", pixels)
        write_picture(inside / f"{image}_lesion" / f"{image}_lesion.bmp", mask)
        write_picture(inside / f"{image}_roi" / f"{image}_R1_Label4.bmp", mask)
        histology = "Melanoma" if diagnosis == 2 else ""
        text.append(
            f"|| {image} ||{histology:>23} ||{diagnosis:19} ||         0 |               T |             A |"
            "       A |                A |                 A ||             3  4 ||"
        )
        sheet.append([image, histology, *("X" if diagnosis == each else "" for each in range(3)), "0"])
    text += ["", "Legend:", "Clinical Diagnosis: 0 - Common Nevus; 1 - Atypical Nevus; 2 - Melanoma."]
    _write(folder / "PH2_dataset.txt", text)
    (folder / "PH2_dataset.xlsx").write_bytes(xlsx(sheet, "Folha1"))


def _write_pad_ufes(folder: Path) -> None:
    """Three archives of images, two of them unpacked into nested folders of their own name."""
    lines, archive = [PAD], dict[str, bytes]()
    for number, diagnosis in enumerate(("NEV", "SEK", "MEL", "ACK", "BCC", "SCC") * 2):
        patient = f"PAT_{1500 + number // 2}"
        image = f"{patient}_{1700 + number}_{300 + number}.png"
        content = encoded(picture("pad_ufes", int(diagnosis == "MEL"), number), ".png")
        part = f"imgs_part_{1 + number % 3}"
        if part == "imgs_part_3":
            archive[image] = content
        else:
            path = folder / "images" / part / part / image
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        lines.append(
            f"{patient},{1700 + number},,,,,53,,,,,,,,ARM,,,{diagnosis},False,False,False,False,False,True,"
            f"{image},False"
        )
    with zipfile.ZipFile(folder / "images" / "imgs_part_3.zip", "w") as zipped:
        for image, content in archive.items():
            zipped.writestr(zipfile.ZipInfo(f"imgs_part_3/{image}", (2020, 6, 1, 0, 0, 0)), content)
    _write(folder / "metadata.csv", lines)


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
