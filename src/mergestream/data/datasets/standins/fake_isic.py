"""A stand-in of the ISIC root: images nested twice, EPVT's tables, and the four sets outside in their own layouts."""

from pathlib import Path

import numpy as np

from mergestream.data.datasets.isic import ARTEFACTS, CARD
from mergestream.data.datasets.standins.drawing import TABLES, Content, picture, write_files

SIZES = {"train": 4, "val": 2, "test": 2}  # images per part, artefact and class
ISIC = TABLES["isic"]


def write_isic(folder: Path) -> None:
    write_files(folder, {**_isic_2019(), **_derm7pt(), **_ph2(), **_pad_ufes()})


def _isic_2019() -> dict[str, Content]:
    files: dict[str, Content] = {}
    truth = ["image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK"]
    metadata = ["image,age_approx,anatom_site_general,lesion_id,sex"]
    tables: dict[str, list[str]] = {part: [ISIC["scores"]] for part in SIZES}
    inside = "ISIC_2019_Training_Input/ISIC_2019_Training_Input/{}.jpg"
    cells = [(part, d, c, n) for part, each in SIZES.items() for d in CARD.domains for c in (0, 1) for n in range(each)]
    for number, (part, domain, label, n) in enumerate(cells):
        image = f"ISIC_{number:07d}"
        files[inside.format(image)] = picture(domain, label, number)
        word = "malignant" if label else "benign"
        tables[part].append(f"{number},{image},{_scores(domain, n)},{label},{word}")
        truth.append(f"{image},{label}.0,{1 - label}.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0")
        # Two images per lesion; the last lesion of a class is not named.
        lesion = "" if n == SIZES[part] - 1 else f"HAM_{number - n % 2:07d}"
        metadata.append(f"{image},55.0,anterior torso,{lesion},female")
    # Neither has a row in the artefact tables; a downsampled image is not the one of the shorter name.
    for image in ("ISIC_0000000_downsampled", "ISIC_0900001"):
        files[inside.format(image)] = picture("carcinoma", 0, len(image))
        truth.append(f"{image},0.0,0.0,1.0,0.0,0.0,0.0,0.0,0.0,0.0")
        metadata.append(f"{image},70.0,head/neck,,male")
    every = [ISIC["scores"], *(line for lines in tables.values() for line in lines[1:])]
    return {
        **files,
        "ISIC_2019_Training_GroundTruth.csv": truth,
        "ISIC_2019_Training_Metadata.csv": metadata,
        **{f"data_proc/{part}_bias_0_1.csv": lines for part, lines in tables.items()},
        "data_proc/isic_inferred_wocarcinoma.csv": every,
    }


def _scores(domain: str, number: int) -> str:
    """Scores that mean a domain; gel borders, ink, patches and vascular lesions do not count, however likely."""
    scores = dict.fromkeys(ARTEFACTS, 0.02 + 0.01 * number)
    if domain != "clean":
        scores[domain] = 0.7 + 0.05 * number
    loud = 0.99 if number % 2 else 0.0001
    order = ("dark_corner", "hair", None, "gel_bubble", "ruler", None, None, None)
    return ",".join(f"{scores[name]:.4f}" if name else str(loud) for name in order)


def _derm7pt() -> dict[str, Content]:
    """One lesion in two pictures; letters of file names in any case, the lists in lower case."""
    meta, diagnoses, files = [ISIC["meta"]], ISIC["diagnoses"], dict[str, Content]()
    rows = {kind: [ISIC["atlas"]] for kind in ("dermoscopic", "clinical")}
    for case, diagnosis in enumerate(diagnoses, start=1):
        label = int("melanoma" in diagnosis)
        clinic, derm = f"NEL/NEL{23 + 2 * case:03d}.JPG", f"NEL/Nel{24 + 2 * case:03d}.jpg"
        for kind, name in (("clinical", clinic), ("dermoscopic", derm)):
            files[f"release_v0/images/{name}"] = picture(f"derm7pt {kind}", label, case)
            if diagnosis != "basal cell carcinoma":
                described = f"{kind},1.1.5.,histopathology,low,high,,5.0,,25,male,1E{case},,,{label}"
                rows[kind].append(f"edraAtlas,,{Path(name).stem.lower()},{described}")
        findings = ",".join(["absent"] * 7)
        meta.append(f"{case},{diagnosis},{label},{findings},low,flat,back,male,excision,{clinic},{derm},,")
    for part, first, last in (("train", 0, 4), ("valid", 4, 6), ("test", 6, len(diagnoses))):
        files[f"release_v0/meta/{part}_indexes.csv"] = ["indexes", *map(str, range(first, last))]
    return {
        **files,
        "release_v0/meta/meta.csv": meta,
        "datasets/edraAtlas/atlas-dermato-all.csv": rows["dermoscopic"],
        "datasets/edraAtlas/atlas-clinical-all.csv": rows["clinical"],
    }


def _ph2() -> dict[str, Content]:
    """A folder per image, with the masks of the lesion and of a colour."""
    files: dict[str, Content] = {}
    text = [ISIC["ph2"]]
    for number in range(6):
        diagnosis, image = number % 3, f"IMD{3 + 7 * number:03d}"
        inside = f"PH2Dataset/PH2 Dataset images/{image}/{image}"
        pixels = picture("ph2", int(diagnosis == 2), number)
        mask = np.where(pixels.mean(axis=-1, keepdims=True) > 90, 255, 0).astype(np.uint8).repeat(3, axis=-1)
        files[f"{inside}_Dermoscopic_Image/{image}.bmp"] = pixels
        files[f"{inside}_lesion/{image}_lesion.bmp"] = files[f"{inside}_roi/{image}_R1_Label4.bmp"] = mask
        text.append(
            f"|| {image} ||{'Melanoma' if diagnosis == 2 else '':>23} ||{diagnosis:19} ||         0 |               T |"
            "             A |       A |                A |                 A ||             3  4 ||"
        )
    text += ["", "Legend:", "Clinical Diagnosis: 0 - Common Nevus; 1 - Atypical Nevus; 2 - Melanoma."]
    return {**files, "PH2Dataset/PH2_dataset.txt": text}


def _pad_ufes() -> dict[str, Content]:
    """Three archives of images, two of them unpacked into nested folders of their own name."""
    lines, files = [ISIC["pad"]], dict[str, Content]()
    for number, diagnosis in enumerate(("NEV", "SEK", "MEL", "ACK", "BCC", "SCC") * 2):
        patient, part = f"PAT_{1500 + number // 2}", f"imgs_part_{1 + number % 3}"
        image = f"{patient}_{1700 + number}_{300 + number}.png"
        place = f"{part}.zip" if part == "imgs_part_3" else part
        files[f"PAD-UFES-20/images/{place}/{part}/{image}"] = picture("pad_ufes", int(diagnosis == "MEL"), number)
        findings = f"{diagnosis},False,False,False,False,False,True,{image},False"
        lines.append(f"{patient},{1700 + number},,,,,53,,,,,,,,ARM,,,{findings}")
    return {**files, "PAD-UFES-20/metadata.csv": lines}
