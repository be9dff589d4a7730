"""Office-Home: 65 everyday objects in four styles (Venkateswara et al. 2017)."""

from mergestream.data.datasets.about import About
from mergestream.data.datasets.index import Index
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.trees import read_tree

CLASSES = """
Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards Computer Couch
Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder Fork Glasses Hammer Helmet Kettle
Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil Postit_Notes
Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon TV Table
Telephone ToothBrush Toys Trash_Can Webcam
"""

ABOUT = About(
    name="office_home",
    title="Office-Home: four styles of pictures, 65 everyday objects",
    layout="office_home/ (or OfficeHomeDataset_10072016/) with Art, Clipart, Product and 'Real World', "
    "each a folder per class",
    licence="non-commercial research and education",
    source="hemanthdv.org/officeHomeDataset.html, or DomainBed's scripts/download.py",
    domains=("Art", "Clipart", "Product", "Real World"),
    classes=tuple(CLASSES.split()),
    notes="The counts per domain are the commonly quoted ones, not checked at the source.",
    counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
)


def read(root: Root) -> Index:
    return read_tree(root, ABOUT, domain_spellings={"Real World": ("RealWorld",)})
