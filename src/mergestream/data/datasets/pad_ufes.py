"""PAD-UFES-20 (Pacheco et al. 2020): skin lesions photographed with smartphones."""

from pathlib import PurePosixPath

from mergestream.data.datasets.index import LeftOut, Sample
from mergestream.data.datasets.roots import Root, by_stem
from mergestream.data.datasets.skin import BENIGN, MELANOMA, SkinSet, find_table
from mergestream.runtime.errors import DataError

# EPVT's tables: the release's own, and the list of Bissoto et al. without carcinomas.
TABLES = ("metadata.csv", "padufes-test-wocarc.csv")
COLUMNS = ("patient_id", "diagnostic", "img_id")
LABELS = {"NEV": BENIGN, "SEK": BENIGN, "MEL": MELANOMA}
CARCINOMAS = {"ACK": "actinic keratosis", "BCC": "basal cell carcinoma", "SCC": "squamous cell carcinoma"}


def read_pad_ufes(root: Root) -> SkinSet | None:
    """Read nevi, seborrhoeic keratoses and melanomas: 244, 235 and 52. The rest is left out, as in EPVT."""
    tables = (find_table(root, name, COLUMNS) for name in TABLES)
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
        elif diagnosis not in LABELS:
            diagnoses = ", ".join((*LABELS, *CARCINOMAS))
            raise DataError(f"{table.path} gives {image} the diagnosis '{diagnosis}', none of {diagnoses}.")
        elif file is None:
            skin_set.missing.append(f"{image} (of {table.path})")
        else:
            group = row["patient_id"] or None
            skin_set.samples.append(Sample(f"pad_ufes/{stem}", file, "pad_ufes", LABELS[diagnosis], group=group))
    return skin_set
