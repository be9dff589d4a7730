"""A stand-in of Messidor: old .xls tables, zips next to folders, and the images that its errata name."""

import zipfile
from pathlib import Path

import numpy as np

from mergestream.data.datasets.standins.drawing import encoded, picture, write_picture, xls

# Two bases per hospital; Base12 and Base33 stay zipped. The tables' own words, spaces included.
HEADER = ("Image name", "Ophthalmologic department", "Retinopathy grade", "Risk of macular edema ")
BASES = {
    "Base11": ("Service Ophtalmologie Lariboisière", HEADER),
    "Base12": ("Service Ophtalmologie Lariboisière", HEADER),
    "Base21": ("CHU de St Etienne", ("image name ", "Ophthalmologic  department", "Retinopathy Grade", HEADER[3])),
    "Base22": ("CHU de St Etienne", HEADER),
    "Base33": ("LaTIM - CHU de BREST", HEADER),
    "Base34": ("LaTIM - CHU de BREST", HEADER),
}
ZIPPED = ("Base12", "Base33")
EACH = 3  # images of a grade in a Base
ERRATUM = ("20051020_64007_0100_PP", 1)  # with the grade that the table had
COPY, ORIGINAL = "20051202_55626_0400_PP", "20051205_33025_0400_PP"


def write_messidor(folder: Path) -> None:
    for number, (base, (department, header)) in enumerate(BASES.items()):
        rows = [(_name(base, grade, n), grade, (grade, n)) for grade in range(4) for n in range(EACH)]
        if base == "Base11":
            rows.append((*ERRATUM, (3, 90)))
        if base == "Base33":
            rows += [(COPY, 2, (3, 91)), (ORIGINAL, 3, (3, 91))]
        images = {f"{stem}.tif": _fundus(department, *drawn, number) for stem, _, drawn in rows}
        if base in ZIPPED:
            _write_zip(folder / f"{base}.zip", images)
        else:
            for name, pixels in images.items():
                write_picture(folder / base / name, pixels)
        table = xls([header, *((f"{stem}.tif", department, grade, 0) for stem, grade, _ in rows)], "Feuil1")
        home = folder if base in ZIPPED else folder / base
        (home / f"Annotation_{base}.xls").write_bytes(table)


def _name(base: str, grade: int, number: int) -> str:
    """Day, seconds of that day, department; later grades were not taken later."""
    department = {"1": "0100", "2": "0200", "3": "0400"}[base[4]]
    second = 9000 + 5923 * (7 * (4 * number + grade) % 13)
    return f"200{4 + int(base[4])}10{10 + int(base[5])}_{second}_{department}_PP"


def _fundus(department: str, grade: int, number: int, base: int) -> np.ndarray:
    """uint8 [32,40,3]: a picture in a black border, as the camera leaves it."""
    pixels = np.zeros((32, 40, 3), dtype=np.uint8)
    pixels[4:28, 8:32] = picture(department, grade, 100 * base + number).clip(40, 255)
    return pixels


def _write_zip(path: Path, images: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, pixels in images.items():
            # A fixed date: the same stand-in has the same bytes.
            archive.writestr(zipfile.ZipInfo(name, (2005, 10, 19, 0, 0, 0)), encoded(pixels, ".tif"))
