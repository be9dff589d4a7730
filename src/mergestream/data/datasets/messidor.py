"""Messidor: diabetic retinopathy in fundus photographs of three hospitals (Decencière et al. 2014)."""

import re
import unicodedata
from collections import defaultdict
from pathlib import PurePosixPath

from mergestream.data.datasets.index import CARDS, Index, LeftOut, Sample
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.table_files import read_sheet
from mergestream.runtime.errors import DataError

CARD = CARDS["messidor"]

# Parts of the departments' names in the tables that survive a wrong encoding.
DEPARTMENTS = {"lariboisi": "Lariboisière", "tienne": "St Etienne", "brest": "Brest"}
COLUMNS = ("Image name", "Ophthalmologic department", "Retinopathy grade")
# Some copies hold the publisher's corrected tables: Annotation_Base11_update20161024.xls.
ANNOTATION = re.compile(r"annotation[ _-]*(base\d\d)([ _-]*update\d+)?\.(xlsx?|csv)", re.IGNORECASE)
BASE = re.compile(r"base\d\d", re.IGNORECASE)
TAKEN = re.compile(r"(\d{8})_(\d+)_\d+_pp", re.IGNORECASE)


def read(root: Root, *, errata: bool = True) -> Index:
    samples, left_out, missing = list[Sample](), list[LeftOut](), list[str]()
    images = [path for path in root.images if TAKEN.fullmatch(PurePosixPath(path).stem) or _base_of(path)]
    files, named = defaultdict[tuple[str, str], list[str]](list), set[str]()
    for path in images:
        files[_base_of(path), PurePosixPath(path).stem.lower()].append(path)
    for base, table in _annotations(root).items():
        for row in read_sheet(root, table, COLUMNS):
            stem, text = PurePosixPath(row["Image name"]).stem, row["Retinopathy grade"]
            if text not in ("0", "1", "2", "3"):
                raise DataError(f"{table} gives {row['Image name']} the retinopathy grade '{text}', none of 0 to 3.")
            grade = int(text)
            matches = files.get((base, stem.lower())) or files.get(("", stem.lower())) or []  # '': one flat folder
            if len(matches) > 1:
                raise DataError(f"{base} has the image {stem} twice: {matches[0]} and {matches[1]}. Keep one of them.")
            if not matches:
                missing.append(f"{base}/{row['Image name']}")
                continue
            named.add(file := matches[0])
            erratum = CARD.errata.get(f"{base}/{stem}", grade) if errata else grade
            if isinstance(erratum, str):
                left_out.append(LeftOut(file, f"a copy of {erratum} (publisher's erratum)"))
                continue
            if erratum != grade:
                left_out.append(LeftOut(f"grade {grade} of {base}/{stem}", f"is {erratum} (publisher's erratum)"))
            domain = department(row["Ophthalmologic department"], table)
            samples.append(Sample(f"{base}/{stem}", file, domain, erratum, acquired=acquired(stem)))
    left_out += [LeftOut(path, "no annotation names it") for path in images if path not in named]
    samples.sort(key=lambda sample: sample.id)
    return Index(CARD, samples, left_out, missing, crop_border=True)


def department(text: str, table: str = "the table") -> str:
    """The hospital of a department, whatever happened to its accents."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    for part, name in DEPARTMENTS.items():
        if part in plain:
            return name
    raise DataError(f"{table} names the department '{text}', none of {', '.join(CARD.domains)}.")


def acquired(stem: str) -> str | None:
    """Day and time of day from a file name, as text that sorts: 20051019_38557_0100_PP -> 20051019-038557."""
    match = TAKEN.fullmatch(stem)
    return f"{match[1]}-{int(match[2]):06d}" if match else None


def _annotations(root: Root) -> dict[str, str]:
    """The annotation table of each Base that is there."""
    tables: dict[str, str] = {}
    for path in root.files:
        match = ANNOTATION.fullmatch(PurePosixPath(path).name)
        if not match:
            continue
        base = match[1].capitalize()
        if base in tables:
            raise DataError(f"{root.location} has two annotations of {base}: {tables[base]} and {path}. Keep one.")
        tables[base] = path
    if not tables:
        raise root.refused("messidor", "Annotation_Base11.xls and so on next to or in Base11 and so on")
    return dict(sorted(tables.items()))


def _base_of(path: str) -> str:
    """The Base whose folder holds an image, '' for none."""
    folders = PurePosixPath(path).parent.parts[::-1]
    return next((folder.capitalize() for folder in folders if BASE.fullmatch(folder)), "")
