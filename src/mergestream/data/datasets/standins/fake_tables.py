"""Stand-ins of images that tables describe, flaws included: MIDOG, Messidor and Terra Incognita."""

import io
import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import numpy as np

from mergestream.data.datasets import midog, terra
from mergestream.data.datasets.standins.drawing import TABLES, Content, picture, write_files
from mergestream.data.datasets.table_files import needed_library

# --- MIDOG 2025, track 2: the CSV and numbered images -------------------------------------------------------

IMAGES = "MIDOG25_Binary_Classification_Train_Set"
SLIDES = TABLES["midog"]["slides"]
SLIDES_PER_TUMOUR = 3
# The first two experts, the third where they differ, and the majority: two cells per class and slide.
VOTES = ("NMF,NMF,,NMF", "AMF,NMF,NMF,NMF", "AMF,AMF,,AMF", "NMF,AMF,AMF,AMF")


def write_midog(folder: Path) -> None:
    """As published: one image for two cells, both rows twice; the next but one image has no row."""
    lines, number, files = [TABLES["midog"]["columns"]], count(1), dict[str, Content]()

    def draw(tumour: str) -> int:
        image = next(number)
        label = "AMF" in VOTES[(image - 1) % len(VOTES)].rpartition(",")[2]
        files[f"{IMAGES}/{image}.png"] = picture(tumour, int(label), image)
        return image

    for position, tumour in enumerate(midog.CARD.domains):
        for slide in range(SLIDES_PER_TUMOUR):
            lines += [_cell(draw(tumour), tumour, slide, 100 * position + slide + 1, votes) for votes in VOTES]
    tumour = "human breast cancer"
    first, second, _ = draw(tumour), draw(tumour), draw(tumour)
    cells = [_cell(first, tumour, 0, 401, VOTES[0], x) for x in (4170, 3048)]
    lines += [*cells, *cells, _cell(second, tumour, 0, 401, VOTES[0])]
    write_files(folder, {**files, midog.TABLE: lines})


def _cell(image: int, tumour: str, slide: int, file: int, votes: str, x: int | None = None) -> str:
    scanner, origin = SLIDES[tumour][slide % len(SLIDES[tumour])]
    species = tumour.partition(" ")[0].capitalize()
    return f"{image}.png,{file:03d}.tiff,{x or 40 * image},{7 * image},{tumour},{scanner},{origin},{species},{votes}"


# --- Messidor: old .xls tables, zips next to folders, and the images that its errata name --------------------

MESSIDOR = TABLES["messidor"]
EACH = 3  # images of a grade in a Base
ERRATUM = ("20051020_64007_0100_PP", 1)  # with the grade that the table had
COPY, ORIGINAL = "20051202_55626_0400_PP", "20051205_33025_0400_PP"


def write_messidor(folder: Path) -> None:
    for number, base in enumerate(MESSIDOR["bases"]):
        department, zipped = MESSIDOR["hospitals"][int(base[4]) - 1], base in MESSIDOR["zipped"]
        rows = [(_name(base, grade, n), grade, (grade, n)) for grade in range(4) for n in range(EACH)]
        rows += [(*ERRATUM, (3, 90))] if base == "Base11" else []
        rows += [(COPY, 2, (3, 91)), (ORIGINAL, 3, (3, 91))] if base == "Base33" else []
        place = f"{base}.zip" if zipped else base
        columns = MESSIDOR["odd_columns"].get(base, MESSIDOR["columns"])
        table = xls([columns, *((f"{stem}.tif", department, grade, 0) for stem, grade, _ in rows)])
        files: dict[str, Content] = {f"{'' if zipped else f'{base}/'}Annotation_{base}.xls": table}
        files |= {f"{place}/{stem}.tif": _fundus(department, *drawn, number) for stem, _, drawn in rows}
        write_files(folder, files)


def xls(rows: Sequence[Sequence[str | int]]) -> bytes:
    """An .xls file of one sheet."""
    xlwt = needed_library("xlwt", "Writing an .xls stand-in", "dev")
    book, buffer = xlwt.Workbook(encoding="utf-8"), io.BytesIO()
    page = book.add_sheet("Feuil1")
    for number, cells in enumerate(rows):
        for place, cell in enumerate(cells):
            page.write(number, place, cell)
    book.save(buffer)
    return buffer.getvalue()


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


# --- Terra Incognita: LILA's annotation files and images ----------------------------------------------------

SPLITS = ("train", "cis_val", "cis_test", "trans_val", "trans_test")
CATEGORIES = TABLES["terra"]["categories"]
LOCATIONS, FRAMES = (100, 38, 43, 46), 3

Annotated = tuple[dict[str, Any], tuple[str, ...]]  # an image, and the category of each of its annotations


def write_terra(folder: Path) -> None:
    """Three frames per burst, a second apart; one burst per class and location; and the odd ones."""
    entries: list[Annotated] = [
        (_frame(location, f"{label:02d}", frame), (name,) * (2 if frame == 2 and name != "empty" else 1))
        for location in LOCATIONS
        for label, name in enumerate(terra.CARD.classes)
        for frame in range(1, FRAMES + 1)
    ]
    # Elsewhere; none of the ten classes; two of the ten; one of the ten and a car, which counts as the one.
    odd = ((33, ("bobcat",)), (38, ("skunk",)), (46, ("raccoon", "opossum")), (46, ("dog", "car")))
    entries += [(_frame(location, str(20 + n), 1), shown) for n, (location, shown) in enumerate(odd)]
    files: dict[str, Content] = {}
    for number, (image, shown) in enumerate(entries):
        pixels = picture(f"location_{image['location']}", list(CATEGORIES).index(shown[0]), number)
        files[f"eccv_18_all_images_sm/{image['file_name']}"] = pixels
    for position, split in enumerate(SPLITS):
        # A burst is not cut by a split.
        inside = [entry for number, entry in enumerate(entries) if number // FRAMES % len(SPLITS) == position]
        inside += entries[:1] if split == "trans_test" else []
        annotations = json.dumps(_annotation_file(inside)).encode()
        files[f"eccv_18_annotation_files/{split}_annotations.json"] = annotations
    write_files(folder, files)


def _frame(location: int, burst: str, frame: int) -> dict[str, Any]:
    id_ = str(uuid5(NAMESPACE_URL, f"{location}/{burst}/{frame}"))
    return {
        "id": id_,
        "file_name": f"{id_}.jpg",
        "location": location,
        "seq_id": str(uuid5(NAMESPACE_URL, f"{location}/{burst}")),
        "seq_num_frames": FRAMES,
        "frame_num": frame,
        "date_captured": f"2012-05-{1 + int(burst):02d} {location % 24:02d}:43:{10 + frame:02d}",
        "width": 24,
        "height": 24,
        "rights_holder": "nobody",
    }


def _annotation_file(entries: list[Annotated]) -> dict[str, Any]:
    annotations = [
        {"id": f"{image['id']}-{number}", "image_id": image["id"], "category_id": CATEGORIES[name]}
        for image, shown in entries
        for number, name in enumerate(shown)
    ]
    return {
        "info": {"version": "a stand-in", "year": 2018},
        "images": [image for image, _ in entries],
        "categories": [{"id": number, "name": name} for name, number in CATEGORIES.items()],
        "annotations": annotations,
    }
