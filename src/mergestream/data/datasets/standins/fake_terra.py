"""Stand-in of Terra Incognita: LILA's annotation files and images."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from mergestream.data.datasets import terra
from mergestream.data.datasets.standins.drawing import picture, write_picture

SPLITS = ("train", "cis_val", "cis_test", "trans_val", "trans_test")
# Numbers with gaps, and categories that the protocol leaves out.
CATEGORIES = {
    "opossum": 1,
    "raccoon": 3,
    "squirrel": 5,
    "bobcat": 6,
    "skunk": 7,
    "dog": 8,
    "coyote": 9,
    "rabbit": 10,
    "bird": 11,
    "cat": 16,
    "empty": 30,
    "car": 33,
}
LOCATIONS = (100, 38, 43, 46)
FRAMES = 3

Annotated = tuple[dict[str, Any], tuple[str, ...]]  # an image, and the category of each of its annotations


def write_terra(folder: Path) -> None:
    """Every class everywhere, and the odd ones: see `_odd`. One image is listed in two files."""
    entries = [*_bursts(), *_odd()]
    for number, (image, shown) in enumerate(entries):
        place = f"location_{image['location']}"
        pixels = picture(place, list(CATEGORIES).index(shown[0]), number)
        write_picture(folder / "eccv_18_all_images_sm" / image["file_name"], pixels)
    for position, split in enumerate(SPLITS):
        # A burst is not cut by a split.
        inside = [entry for number, entry in enumerate(entries) if number // FRAMES % len(SPLITS) == position]
        inside += entries[:1] if split == "trans_test" else []
        path = folder / "eccv_18_annotation_files" / f"{split}_annotations.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_annotation_file(inside)), encoding="utf-8")


def _bursts() -> Iterator[Annotated]:
    """Three frames per burst, a second apart, one burst per class and location."""
    for location in LOCATIONS:
        for label, name in enumerate(terra.CARD.classes):
            for frame in range(1, FRAMES + 1):
                two_animals = frame == 2 and name != "empty"
                yield _image(location, f"{label:02d}", frame), (name, name) if two_animals else (name,)


def _odd() -> Iterator[Annotated]:
    """Elsewhere; none of the ten classes; two of the ten; one of the ten and a car, which counts as the one."""
    yield _image(33, "20", 1), ("bobcat",)
    yield _image(38, "21", 1), ("skunk",)
    yield _image(46, "22", 1), ("raccoon", "opossum")
    yield _image(46, "23", 1), ("dog", "car")


def _image(location: int, burst: str, frame: int) -> dict[str, Any]:
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
