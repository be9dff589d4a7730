"""HISTOPANTUM: tumour or not in tiles of four cancers of TCGA (Zamanitajeddin et al. 2024)."""

import re

from mergestream.data.datasets.card import DatasetCard
from mergestream.data.datasets.image_tree import read_tree
from mergestream.data.datasets.index import Index
from mergestream.data.datasets.roots import Root

CASE = re.compile(r"TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}(?![A-Z0-9])", re.IGNORECASE)
SPELLINGS = {"non_tumor": ("non_tumour",), "tumor": ("tumour",)}

CARD = DatasetCard(
    name="histopantum",
    title="HISTOPANTUM: tumour or not in tiles of four cancers",
    layout="HISTOPANTUM/ with colon, ovarian, stomach and uterus, each with tumor and non_tumor (or tumour and "
    "non-tumour)",
    licence="not checked; read it in the Zenodo record",
    source="doi.org/10.5281/zenodo.14555794",
    domains=("colon", "ovarian", "stomach", "uterus"),
    classes=("non_tumor", "tumor"),
    views=("hflip", "vflip", "rot180", "transpose"),
    group="TCGA case, from the file name",
    notes="No counts are compared: 27,248 tiles of colon and 140,569 in all are second-hand, the rest is not known. A "
    "tile whose name does not begin with a TCGA case is a group of its own.",
)


def read(root: Root) -> Index:
    return read_tree(root, CARD, class_spellings=SPELLINGS, group_of=case_of)


def case_of(stem: str) -> str | None:
    """`TCGA-3L-AA1B` of `TCGA-3L-AA1B-01Z-00-DX1_10240_15360`."""
    case = CASE.match(stem)
    return case.group().upper() if case else None
