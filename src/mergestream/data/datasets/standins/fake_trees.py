"""Stand-ins of images in folders domain/class/image, and of a user's own table."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from mergestream.data.datasets.image_trees import HISTOPANTUM, OFFICE_HOME, PACS, VLCS
from mergestream.data.datasets.index import DatasetCard
from mergestream.data.datasets.standins.drawing import picture, write_picture


def write_tree(
    folder: Path, card: DatasetCard, each: int, name: Callable[[int], str], spelt: dict[str, str] | None = None
) -> None:
    """`each` pictures per domain and class; `spelt` gives folders another name than the class or domain has."""
    spelling = spelt or {}
    for domain in card.domains:
        for label, class_name in enumerate(card.classes):
            for number in range(each):
                inside = folder / spelling.get(domain, domain) / spelling.get(class_name, class_name)
                write_picture(inside / name(number), picture(domain, label, number))


def write_pacs(folder: Path) -> None:
    """As the zip unpacks: kfold/, and the hidden files of a Mac."""
    write_tree(folder / "kfold", PACS, 4, lambda n: f"pic_{n + 1:03d}.jpg")
    (folder / "kfold" / ".DS_Store").write_bytes(b"\0")
    write_picture(folder / "__MACOSX" / "kfold" / "photo" / "dog" / "._pic_001.png", picture("photo", 0, 0))


def write_vlcs(folder: Path) -> None:
    write_tree(folder / "VLCS", VLCS, 4, lambda n: f"img_{n:04d}.jpg")


def write_office_home(folder: Path) -> None:
    """With the space in 'Real World' that mirrors replace, and the two files next to the domains."""
    inside = folder / "OfficeHomeDataset_10072016"
    write_tree(inside, OFFICE_HOME, 2, lambda n: f"{n + 1:05d}.jpg")
    (inside / "ImageInfo.csv").write_text("Domain,Class,Image\n", encoding="utf-8")
    (inside / "imagelist.txt").write_text("\n", encoding="utf-8")


def write_histopantum(folder: Path) -> None:
    """Cases of two tiles per class, and class folders in every spelling that copies have."""
    spellings = {
        "colon": ("non-tumour", "tumour"),
        "ovarian": ("non_tumor", "tumor"),
        "stomach": ("non tumour", "Tumour"),
        "uterus": ("non-tumor", "tumor"),
    }
    for domain, (healthy, tumour) in spellings.items():
        only = replace(HISTOPANTUM, domains=(domain,))
        spelt = {"non_tumor": healthy, "tumor": tumour}
        write_tree(folder / "HISTOPANTUM", only, 4, partial(_tile, domain), spelt)


def _tile(domain: str, number: int) -> str:
    case = f"TCGA-{domain[:2].upper()}-AA{number // 2}B"
    return f"{case}-01Z-00-DX1_{1024 * number}_15360.jpg"


CLASSES, SITES = ("benign", "malignant", "normal"), ("brest", "lyon", "turin")


def write_folder(folder: Path) -> None:
    for site in SITES:
        for label, name in enumerate(CLASSES):
            for number in range(6):
                ending = (".png", ".jpg", ".webp", ".bmp", ".tiff", ".png")[number]
                write_picture(folder / site / name / f"{number}{ending}", picture(site, label, number))


def write_table(folder: Path) -> None:
    """Two images per patient, a time of acquisition, and the scanner as a subgroup."""
    lines = ["image,label,domain,group,acquired,scanner"]
    for site in SITES:
        for label, name in enumerate(CLASSES):
            for number in range(6):
                image = f"images/{site}_{name}_{number}.png"
                write_picture(folder / image, picture(site, label, number))
                time = f"2025-03-{10 + number:02d}T{8 + label:02d}:30"
                scanner = "A" if number % 2 else "B"
                lines.append(f"{image},{name},{site},{site}-{label}-{number // 2},{time},{scanner}")
    (folder / "samples.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
