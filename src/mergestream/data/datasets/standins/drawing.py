"""Pictures for stand-ins, their files and trees. The class is a pattern, the domain a colour, the number a shade."""

import io
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image

from mergestream.data.datasets.image_trees import HISTOPANTUM, OFFICE_HOME, PACS, VLCS
from mergestream.data.datasets.index import DatasetCard

TABLES = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
Content = np.ndarray | bytes | Sequence[str]  # a picture uint8 [H,W] or [H,W,3], bytes, or lines of text


def picture(domain: str, label: int, number: int, pixels: int = 24) -> np.ndarray:
    """uint8 [H,W,3]; the same arguments give the same picture."""
    random = np.random.RandomState([zlib.crc32(domain.encode()), label, number])
    colour = np.random.RandomState(zlib.crc32(domain.encode())).uniform(0.3, 1, size=3)
    y, x = np.mgrid[:pixels, :pixels] / pixels
    angle, waves = np.pi * label / 7, 2 + label % 4
    pattern = 0.5 + 0.4 * np.sin(2 * np.pi * waves * (x * np.cos(angle) + y * np.sin(angle)) + random.uniform(0, 6))
    noisy = pattern[..., None] * colour + random.normal(0, 0.05, size=(pixels, pixels, 3))
    return np.round(255 * noisy.clip(0, 1)).astype(np.uint8)


def grey(domain: str, label: int, number: int, pixels: int = 24) -> np.ndarray:
    """uint8 [H,W]."""
    return picture(domain, label, number, pixels).mean(axis=-1).astype(np.uint8)


def encoded(pixels: np.ndarray, suffix: str) -> bytes:
    """Encode a picture in the format of an ending such as '.png'."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, Image.registered_extensions()[suffix.lower()])
    return buffer.getvalue()


def write_files(folder: Path, files: Mapping[str, Content]) -> None:
    """Write files by their path relative to a folder; 'a.zip/b.png' goes into a zip."""
    for name, content in files.items():
        archive, _, member = name.rpartition(".zip/")
        if isinstance(content, np.ndarray):
            content = encoded(content, Path(name).suffix)
        elif not isinstance(content, bytes):
            content = "".join(f"{line}\n" for line in content).encode()
        path = folder / (f"{archive}.zip" if archive else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if archive:
            with zipfile.ZipFile(path, "a") as zipped:  # a fixed date: the same stand-in has the same bytes
                zipped.writestr(zipfile.ZipInfo(member, (2005, 10, 19, 0, 0, 0)), content)
        else:
            path.write_bytes(content)


# --- images in folders domain/class/image, and a user's own table -------------------------------------------

CLASSES, SITES = ("benign", "malignant", "normal"), ("brest", "lyon", "turin")
OWN = DatasetCard("folder", "", "", "", "", domains=SITES, classes=CLASSES)
ENDINGS = (".png", ".jpg", ".webp", ".bmp", ".tiff", ".png")


def write_tree(folder: Path, card: DatasetCard, each: int, name: Callable[[int], str]) -> None:
    """`each` pictures per domain and class."""
    cells = product(card.domains, enumerate(card.classes), range(each))
    write_files(folder, {f"{site}/{kind}/{name(n)}": picture(site, label, n) for site, (label, kind), n in cells})


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
    files: dict[str, Content] = {}
    for domain, spelling in zip(HISTOPANTUM.domains, spellings, strict=True):
        for (label, name), n in product(enumerate(spelling), range(4)):
            tile = f"TCGA-{domain[:2].upper()}-AA{n // 2}B-01Z-00-DX1_{1024 * n}_15360.jpg"
            files[f"HISTOPANTUM/{domain}/{name}/{tile}"] = picture(domain, label, n)
    write_files(folder, files)


def write_folder(folder: Path) -> None:
    write_tree(folder, OWN, len(ENDINGS), lambda n: f"{n}{ENDINGS[n]}")


def write_table(folder: Path) -> None:
    """Two images per patient, a time of acquisition, and the scanner as a subgroup."""
    lines, files = ["image,label,domain,group,acquired,scanner"], dict[str, Content]()
    for site, (label, name), number in product(SITES, enumerate(CLASSES), range(6)):
        image = f"images/{site}_{name}_{number}.png"
        files[image] = picture(site, label, number)
        time = f"2025-03-{10 + number:02d}T{8 + label:02d}:30"
        lines.append(f"{image},{name},{site},{site}-{label}-{number // 2},{time},{'A' if number % 2 else 'B'}")
    write_files(folder, {**files, "samples.csv": lines})
