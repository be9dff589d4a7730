"""ISIC 2019 by artefact, melanoma against benign, and four sets for testing only (EPVT, Yan et al. 2023)."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath

from mergestream.data.datasets.index import CARDS, Index, LeftOut, Sample
from mergestream.data.datasets.outside_skin import MELANOMA, OUTSIDE, SkinSet, SkinTable, binary_label, find_table
from mergestream.data.datasets.roots import Root, by_stem
from mergestream.runtime.errors import DataError

CARD = CARDS["isic"]
ARTEFACTS = ("dark_corner", "hair", "gel_bubble", "ruler")

INFERRED = "isic_inferred_wocarcinoma.csv"
THRESHOLD = 0.65
IMAGE = re.compile(r"ISIC_\d+(_downsampled)?", re.IGNORECASE)
PART_FOLDER = re.compile(r"ISIC2019_(train|val|test)", re.IGNORECASE)


def artefact_domain(scores: Mapping[str, float]) -> str:
    """EPVT's rule: the likeliest of four artefacts if above 0.65, else clean; the first one of equals."""
    likeliest = max(ARTEFACTS, key=lambda artefact: scores[artefact])
    return likeliest if scores[likeliest] > THRESHOLD else "clean"


def read(root: Root, *, bias: str = "0_1") -> Index:
    skin_set = _inside(root, bias)
    outside: dict[str, SkinSet] = {}
    for domain, read_outside in OUTSIDE.items():
        each = read_outside(root)
        if each and each.samples:
            outside[domain] = each
        elif each:
            skin_set.left_out.append(LeftOut(each.table, "none of the images that it names is under the root"))
    if not skin_set.samples and not outside:
        named = f"its tables name {len(skin_set.missing)} images, none of which is there; " if skin_set.missing else ""
        expected = (
            f"the artefact tables (train_bias_0_1.csv or {INFERRED}) with the images, EPVT's folders "
            f"ISIC2019_train/<artefact>/ben, or one of {', '.join(CARD.outside)}"
        )
        raise root.refused("isic", expected, f"{named}it holds {root.glance()}")
    every = [skin_set, *outside.values()] if skin_set.samples else list(outside.values())
    left_out = dict.fromkeys(each for one in (skin_set, *outside.values()) for each in one.left_out)
    published = {domain for domain in CARD.domains if skin_set.as_published}
    published |= {domain for domain, each in outside.items() if each.as_published}
    card = replace(
        CARD,
        domains=CARD.domains if skin_set.samples else (),
        outside=tuple(outside),
        counts={domain: count for domain, count in CARD.counts.items() if domain in published},
        part_counts=CARD.part_counts if published >= {*CARD.domains} else {},
    )
    return Index(
        card,
        [sample for one in every for sample in one.samples],
        tuple(left_out),
        [file for one in every for file in one.missing],
        missing_parts=skin_set.missing_parts,
    )


def _inside(root: Root, bias: str) -> SkinSet:
    """ISIC itself."""
    files = by_stem(path for path in root.images if IMAGE.fullmatch(PurePosixPath(path).stem))
    tables = _tables(root, bias)
    if not tables:
        placed = _folder_rows(root)
        names = {row.id.lower(): path for path, row in placed.items()}
        skin_set = _join(root, placed.values(), names, "EPVT's folders")
        skin_set.as_published = all(row.part for row in placed.values())
        return skin_set
    rows = [row for part, table in tables.items() for row in scored(table, part)]
    skin_set = _join(root, rows, files, next(iter(tables.values())).path)
    named = {row.id.lower() for row in rows}
    if skin_set.samples:
        why = "in none of the artefact tables (carcinomas are not)"
        skin_set.left_out += [LeftOut(path, why) for stem, path in files.items() if stem not in named]
    else:
        skin_set.left_out = [LeftOut(table.path, "none of its images is under the root") for table in tables.values()]
    skin_set.as_published = bias == "0_1" and None not in tables
    return skin_set


def _tables(root: Root, bias: str) -> dict[str | None, SkinTable]:
    """The artefact tables by part; the table without splits is used if there is no other."""
    columns = ("image", *ARTEFACTS, "label")
    split = {part: find_table(root, f"{part}_bias_{bias}.csv", columns) for part in CARD.parts}
    tables: dict[str | None, SkinTable] = {part: table for part, table in split.items() if table}
    if not tables and bias != "0_1":
        raise DataError(f"{root.location} has no train_bias_{bias}.csv: bias= is written as in '0.5_3'.")
    whole = None if tables else find_table(root, INFERRED, columns)
    return {None: whole} if whole else tables


def scored(table: SkinTable, part: str | None) -> list[Sample]:
    """The rows of an artefact table, without their files: domain by the scores, label from the table."""
    rows = []
    for row in table.rows:
        image = row["image"]
        try:
            scores = {artefact: float(row[artefact]) for artefact in ARTEFACTS}
        except ValueError as error:
            raise DataError(f"{table.path} has a score of {image} that is not a number: {error}.") from error
        if not all(map(math.isfinite, scores.values())):
            raise DataError(f"{table.path} has a score of {image} that is not finite: {scores}.")
        label = binary_label(row["label"], table.path, image)
        rows.append(Sample(image, "", artefact_domain(scores), label, part=part))
    return rows


def _folder_rows(root: Root) -> dict[str, Sample]:
    """Rows from EPVT's folders ISIC2019_train/<domain>/{ben,mel}."""
    rows: dict[str, Sample] = {}
    for path in root.images:
        above, domain, name = ("", "", "", *(part.lower() for part in PurePosixPath(path).parent.parts))[-3:]
        if domain in CARD.domains and name in ("ben", "mel"):
            part = PART_FOLDER.fullmatch(above)
            label = int(name == "mel")
            rows[path] = Sample(PurePosixPath(path).stem, path, domain, label, part=part[1] if part else None)
    return rows


def _join(root: Root, rows: Iterable[Sample], files: Mapping[str, str], table: str) -> SkinSet:
    """Join rows with their files, lesions and the challenge's own diagnosis."""
    lesions = _column(root, "ISIC_2019_Training_Metadata.csv", "lesion_id")
    melanomas = _column(root, "ISIC_2019_Training_GroundTruth.csv", "MEL")
    skin_set = SkinSet(table)
    for row in rows:
        file = files.get(row.id.lower())
        truth = melanomas.get(row.id)
        if file is None:
            skin_set.missing.append(f"{row.id}.jpg")
            skin_set.missing_parts |= {f"{row.id}.jpg": row.part} if row.part else {}
        elif truth and (truth in ("1", "1.0")) != (row.label == MELANOMA):
            skin_set.left_out.append(LeftOut(file, f"{CARD.classes[row.label]} by {table}, not by ISIC's ground truth"))
        else:
            group = lesions.get(row.id) or None
            skin_set.samples.append(replace(row, file=file, group=group))
    return skin_set


def _column(root: Root, name: str, column: str) -> dict[str, str]:
    table = find_table(root, name, ("image", column))
    return {row["image"]: row[column] for row in table.rows} if table else {}
