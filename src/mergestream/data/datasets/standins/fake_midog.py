"""Stand-in of MIDOG 2025, track 2: the CSV with its flaws, and numbered images."""

from itertools import count
from pathlib import Path

from mergestream.data.datasets import midog
from mergestream.data.datasets.standins.drawing import picture, write_picture

HEADER = "image_id,filename,coordinateX,coordinateY,Tumor,Scanner,Origin,Species,expert1,expert2,expert3,majority"
IMAGES = "MIDOG25_Binary_Classification_Train_Set"
# Scanner and origin by slide; one spelling of a scanner is wrong as published.
SLIDES = {
    "canine cutaneous mast cell tumor": [("Aperio CS2", "FU Berlin")],
    "canine lung cancer": [("3D Histech", "VMU Vienna")],
    "canine lymphoma": [("3D Histech", "VMU Vienna")],
    "canine soft tissue sarcoma": [("3D Histech", "AMC New York"), ("3D Histech", "VMU Vienna")],
    "human breast cancer": [(s, "UMC Utrecht") for s in ("Aperio CS2", "Hamamatsu S360", "Hamammatsu XR")],
    "human melanoma": [("Hamamatsu XR", "UMC Utrecht")],
    "human neuroendocrine tumor": [("Hamamatsu XR", "UMC Utrecht")],
}
SLIDES_PER_TUMOUR = 3
# The first two experts, the third where they differ, and the majority: two cells per class and slide.
VOTES = ("NMF,NMF,,NMF", "AMF,NMF,NMF,NMF", "AMF,AMF,,AMF", "NMF,AMF,AMF,AMF")


def write_midog(folder: Path) -> None:
    lines, number = [HEADER], count(1)
    for position, tumour in enumerate(midog.CARD.domains):
        for slide in range(SLIDES_PER_TUMOUR):
            for votes in VOTES:
                image = next(number)
                _write_image(folder, tumour, image)
                lines.append(_row(image, tumour, slide, 100 * position + slide + 1, votes))
    lines += _flaws(folder, next(number))
    (folder / midog.TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _flaws(folder: Path, first: int) -> list[str]:
    """As published: one image for two cells, both rows twice; the next but one image has no row."""
    tumour = "human breast cancer"
    for image in (first, first + 1, first + 2):
        _write_image(folder, tumour, image)
    cells = [_row(first, tumour, 0, 401, VOTES[0], x) for x in (4170, 3048)]
    return [*cells, *cells, _row(first + 1, tumour, 0, 401, VOTES[0])]


def _row(image: int, tumour: str, slide: int, file: int, votes: str, x: int | None = None) -> str:
    scanner, origin = SLIDES[tumour][slide % len(SLIDES[tumour])]
    species = tumour.partition(" ")[0].capitalize()
    return f"{image}.png,{file:03d}.tiff,{x or 40 * image},{7 * image},{tumour},{scanner},{origin},{species},{votes}"


def _write_image(folder: Path, tumour: str, number: int) -> None:
    label = "AMF" in VOTES[(number - 1) % len(VOTES)].rpartition(",")[2]
    write_picture(folder / IMAGES / f"{number}.png", picture(tumour, int(label), number))
