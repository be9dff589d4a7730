"""VLCS: photographs of five classes from four older data sets (Fang et al. 2013), as DomainBed arranges them."""

from mergestream.data.datasets.about import About
from mergestream.data.datasets.index import Index
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.trees import read_tree

ABOUT = About(
    name="vlcs",
    title="VLCS: photographs from four collections, five classes",
    layout="VLCS/ with Caltech101, LabelMe, SUN09 and VOC2007, each a folder per class",
    licence="that of the four collections; research use",
    source="DomainBed's scripts/download.py",
    domains=("Caltech101", "LabelMe", "SUN09", "VOC2007"),
    classes=("bird", "car", "chair", "dog", "person"),
    notes="The counts per domain are the commonly quoted ones, not checked at the source.",
    counts={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
)


def read(root: Root) -> Index:
    return read_tree(root, ABOUT)
