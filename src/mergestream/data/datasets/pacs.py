"""PACS: photographs, art, cartoons and sketches of seven things (Li et al. 2017)."""

from mergestream.data.datasets.about import About
from mergestream.data.datasets.index import Index
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.trees import read_tree

ABOUT = About(
    name="pacs",
    title="PACS: four styles of pictures, seven classes",
    layout="PACS/ (or kfold/) with art_painting, cartoon, photo and sketch, each a folder per class",
    licence="none published; research use",
    source="dali-dl.github.io/project_iccv2017.html, or DomainBed's scripts/download.py",
    domains=("art_painting", "cartoon", "photo", "sketch"),
    classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
    counts={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
)


def read(root: Root) -> Index:
    return read_tree(root, ABOUT)
