"""Images in folders domain/class/image: PACS, VLCS and Office-Home as DomainBed arranges them, and HISTOPANTUM."""

import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

from mergestream.data.datasets.index import DatasetCard, Index, LeftOut, Sample
from mergestream.data.datasets.roots import IMAGES, Root
from mergestream.runtime.errors import DataError

Spellings = Mapping[str, tuple[str, ...]]


def read_tree(
    root: Root,
    card: DatasetCard,
    *,
    domain_spellings: Spellings | None = None,
    class_spellings: Spellings | None = None,
    group_of: Callable[[str], str | None] = lambda stem: None,  # noqa: ARG005
) -> Index:
    """Index a published tree, wherever it starts under the root. Mirrors may spell names differently."""
    domains = _find_domains(root, card, domain_spellings or {})
    class_names = _by_spelling(card.classes, class_spellings or {})
    samples, left_out = [], []
    for domain in card.domains:
        for path in root.under(domains[domain]):
            inside = PurePosixPath(path).relative_to(domains[domain])
            name = class_names.get(plain_name(inside.parts[0])) if len(inside.parts) > 1 else None
            if name is None:
                left_out.append(LeftOut(path, f"'{inside.parts[0]}' is not a class of '{card.name}'"))
            elif inside.suffix.lower() not in IMAGES:
                left_out.append(LeftOut(path, "not an image file"))
            else:
                id_ = PurePosixPath(domain, name, *inside.parts[1:]).as_posix()
                label = card.classes.index(name)
                samples.append(Sample(id_, path, domain, label, group=group_of(inside.stem)))
    return Index(card, card.classes, card.domains, tuple(samples), tuple(left_out))


def has_tree(root: Root, card: DatasetCard, domain_spellings: Spellings | None = None) -> bool:
    return len(_search(root, card, domain_spellings or {})[1]) == len(card.domains)


def _find_domains(root: Root, card: DatasetCard, spellings: Spellings) -> dict[str, str]:
    folder, domains = _search(root, card, spellings)
    if len(domains) < len(card.domains):
        absent = [domain for domain in card.domains if domain not in domains]
        seen = f"{folder or 'it'} lacks {', '.join(absent)}" if domains else f"it holds {root.glance()}"
        raise DataError(
            f"{root.location} is not a root of '{card.name}': it should hold the folders "
            f"{', '.join(card.domains)}, each with a folder per class; {seen}."
        )
    return {domain: _unwrapped(root, path) for domain, path in domains.items()}


def _unwrapped(root: Root, folder: str) -> str:
    """A zip per domain often holds one folder with the zip's own name."""
    twice = f"{folder}/{PurePosixPath(folder).name}"
    return twice if len(root.under(twice)) == len(root.under(folder)) else folder


def _search(root: Root, card: DatasetCard, spellings: Spellings) -> tuple[str, dict[str, str]]:
    """The folder with most of the domains, the shallowest first, and the path of each domain."""
    domain_names = _by_spelling(card.domains, spellings)
    best: tuple[str, dict[str, str]] = ("", {})
    for folder in root.folders:
        matches = [
            (domain_names[plain_name(n)], path)
            for n, path in root.children(folder).items()
            if plain_name(n) in domain_names
        ]
        here = dict(matches)
        if len(here) < len(matches):
            raise DataError(f"{root.location} has two folders of one domain: {', '.join(path for _, path in matches)}.")
        if len(here) > len(best[1]):
            best = folder, here
    return best


def _by_spelling(names: tuple[str, ...], spellings: Spellings) -> dict[str, str]:
    return {plain_name(way): name for name in names for way in (name, *spellings.get(name, ()))}


def plain_name(name: str) -> str:
    """Normalise a name: Real World, Real_World and real-world are the same."""
    return re.sub(r"[\s_-]+", "_", name.strip().lower())


QUOTED = "The counts per domain are the commonly quoted ones, not checked at the source."
OBJECTS = """
Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards Computer Couch
Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder Fork Glasses Hammer Helmet Kettle
Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil Postit_Notes
Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon TV Table
Telephone ToothBrush Toys Trash_Can Webcam
"""

# Li et al. 2017.
PACS = DatasetCard(
    name="pacs",
    title="PACS: four styles of pictures, seven classes",
    layout="PACS/ (or kfold/) with art_painting, cartoon, photo and sketch, each a folder per class",
    licence="none published; research use",
    source="dali-dl.github.io/project_iccv2017.html, or DomainBed's scripts/download.py",
    domains=("art_painting", "cartoon", "photo", "sketch"),
    classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
    counts={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
)
# Fang et al. 2013.
VLCS = DatasetCard(
    name="vlcs",
    title="VLCS: photographs from four collections, five classes",
    layout="VLCS/ with Caltech101, LabelMe, SUN09 and VOC2007, each a folder per class",
    licence="that of the four collections; research use",
    source="DomainBed's scripts/download.py",
    domains=("Caltech101", "LabelMe", "SUN09", "VOC2007"),
    classes=("bird", "car", "chair", "dog", "person"),
    notes=QUOTED,
    counts={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
)
# Venkateswara et al. 2017.
OFFICE_HOME = DatasetCard(
    name="office_home",
    title="Office-Home: four styles of pictures, 65 everyday objects",
    layout="office_home/ (or OfficeHomeDataset_10072016/) with Art, Clipart, Product and 'Real World', "
    "each a folder per class",
    licence="non-commercial research and education",
    source="hemanthdv.org/officeHomeDataset.html, or DomainBed's scripts/download.py",
    domains=("Art", "Clipart", "Product", "Real World"),
    classes=tuple(OBJECTS.split()),
    notes=QUOTED,
    counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
)


def read_pacs(root: Root) -> Index:
    return read_tree(root, PACS)


def read_vlcs(root: Root) -> Index:
    return read_tree(root, VLCS)


def read_office_home(root: Root) -> Index:
    return read_tree(root, OFFICE_HOME, domain_spellings={"Real World": ("RealWorld",)})


# Zamanitajeddin et al. 2024.
TCGA_CASE = re.compile(r"TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}(?![A-Z0-9])", re.IGNORECASE)
TUMOUR_SPELLINGS = {"non_tumor": ("non_tumour",), "tumor": ("tumour",)}

HISTOPANTUM = DatasetCard(
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


def read_histopantum(root: Root) -> Index:
    return read_tree(root, HISTOPANTUM, class_spellings=TUMOUR_SPELLINGS, group_of=case_of)


def case_of(stem: str) -> str | None:
    """`TCGA-3L-AA1B` of `TCGA-3L-AA1B-01Z-00-DX1_10240_15360`."""
    case = TCGA_CASE.match(stem)
    return case.group().upper() if case else None
