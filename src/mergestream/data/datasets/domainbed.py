"""PACS, VLCS and Office-Home: trees of images as DomainBed arranges them."""

from mergestream.data.datasets.card import DatasetCard
from mergestream.data.datasets.image_tree import read_tree
from mergestream.data.datasets.index import Index
from mergestream.data.datasets.roots import Root

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
