"""Stand-ins of images in folders domain/class/image, and of a user's own table."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mergestream.data.datasets.image_trees import HISTOPANTUM, OFFICE_HOME, PACS, VLCS
from mergestream.data.datasets.index import DatasetCard
from mergestream.data.datasets.standins.drawing import Content, picture, write_files

CLASSES, SITES = ("benign", "malignant", "normal"), ("brest", "lyon", "turin")
OWN = DatasetCard("folder", "", "", "", "", domains=SITES, classes=CLASSES)
ENDINGS = (".png", ".jpg", ".webp", ".bmp", ".tiff", ".png")


def write_tree(
    folder: Path, card: DatasetCard, each: int, name: Callable[[int], str], spelt: dict[str, str] | None = None
) -> None:
    """`each` pictures per domain and class; `spelt` gives folders another name than the class or domain has."""
    files: dict[str, Content] = {}
    for domain in card.domains:
        for label, class_name in enumerate(card.classes):
            inside = "/".join((spelt or {}).get(part, part) for part in (domain, class_name))
            files |= {f"{inside}/{name(number)}": picture(domain, label, number) for number in range(each)}
    write_files(folder, files)


def write_pacs(folder: Path) -> None:
    """As the zip unpacks: kfold/, and the hidden files of a Mac."""
    write_tree(folder / "kfold", PACS, 4, lambda n: f"pic_{n + 1:03d}.jpg")
    hidden: dict[str, Content] = {
        "kfold/.DS_Store": b"\0",
        "__MACOSX/kfold/photo/dog/._pic_001.png": picture("photo", 0, 0),
    }
    write_files(folder, hidden)


def write_vlcs(folder: Path) -> None:
    write_tree(folder / "VLCS", VLCS, 4, lambda n: f"img_{n:04d}.jpg")


def write_office_home(folder: Path) -> None:
    """With the space in 'Real World' that mirrors replace, and the two files next to the domains."""
    inside = folder / "OfficeHomeDataset_10072016"
    write_tree(inside, OFFICE_HOME, 2, lambda n: f"{n + 1:05d}.jpg")
    write_files(inside, {"ImageInfo.csv": ["Domain,Class,Image"], "imagelist.txt": [""]})


def write_histopantum(folder: Path) -> None:
    """Cases of two tiles per class, and class folders in every spelling that copies have."""
    spellings = (("non-tumour", "tumour"), ("non_tumor", "tumor"), ("non tumour", "Tumour"), ("non-tumor", "tumor"))
    for domain, (healthy, tumour) in zip(HISTOPANTUM.domains, spellings, strict=True):
        case = f"TCGA-{domain[:2].upper()}-AA{{}}B-01Z-00-DX1_{{}}_15360.jpg"
        write_tree(
            folder / "HISTOPANTUM",
            replace(HISTOPANTUM, domains=(domain,)),
            4,
            lambda n, case=case: case.format(n // 2, 1024 * n),  # type: ignore[misc]
            {"non_tumor": healthy, "tumor": tumour},
        )


def write_folder(folder: Path) -> None:
    write_tree(folder, OWN, len(ENDINGS), lambda n: f"{n}{ENDINGS[n]}")


def write_table(folder: Path) -> None:
    """Two images per patient, a time of acquisition, and the scanner as a subgroup."""
    lines, files = ["image,label,domain,group,acquired,scanner"], dict[str, Content]()
    for site in SITES:
        for label, name in enumerate(CLASSES):
            for number in range(6):
                image = f"images/{site}_{name}_{number}.png"
                files[image] = picture(site, label, number)
                time = f"2025-03-{10 + number:02d}T{8 + label:02d}:30"
                scanner = "A" if number % 2 else "B"
                lines.append(f"{image},{name},{site},{site}-{label}-{number // 2},{time},{scanner}")
    write_files(folder, {**files, "samples.csv": lines})
