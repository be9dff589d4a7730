"""Terra Incognita: camera traps at four places (Beery et al. 2018), as DomainBed arranges them or as LILA has them."""

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from mergestream.data.datasets.image_trees import has_tree, read_tree
from mergestream.data.datasets.index import CARDS, Index, LeftOut, Sample
from mergestream.data.datasets.roots import Root, by_stem
from mergestream.runtime.errors import DataError

ANNOTATIONS = "_annotations.json"
# The table of all of LILA's images, which DomainBed's script reads: caltech_images_20210113.json.
WHOLE_TABLE = re.compile(r"caltech_images_\d+\.json", re.IGNORECASE)

CARD = CARDS["terra"]


@dataclass
class _Image:
    """What all annotation files say about one image."""

    name: str
    locations: set[str] = field(default_factory=set)
    categories: set[str] = field(default_factory=set)
    burst: str | None = None
    taken: str | None = None
    frame: int = 0


def read(root: Root) -> Index:
    files = [path for path in root.files if path.lower().endswith(ANNOTATIONS)]
    files = files or [path for path in root.files if WHOLE_TABLE.fullmatch(PurePosixPath(path).name)]
    if has_tree(root, CARD):
        return _without_copies(root, read_tree(root, CARD))
    if files:
        return _read_annotated(root, files)
    try:
        return read_tree(root, CARD)
    except DataError as error:
        raise DataError(f"{error} Or, as LILA publishes it, *{ANNOTATIONS} files and the images they name.") from error


def _without_copies(root: Root, index: Index) -> Index:
    """The tree without images that are in two class folders of one location."""
    alike = defaultdict(list)
    for sample in index.samples:
        alike[sample.domain, PurePosixPath(sample.file).name, root.stamp(sample.file)[0]].append(sample)
    # Mirrors may number the images of every class from 1: one name and one size are not yet one image.
    several = [group for group in alike.values() if len({sample.label for sample in group}) > 1]
    contents = [(sample, root.read(sample.file)) for group in several for sample in group]
    times = Counter((sample.domain, content) for sample, content in contents)
    copies = {sample.file for sample, content in contents if times[sample.domain, content] > 1}
    left_out = [LeftOut(path, "is in the folders of two classes") for path in sorted(copies)]
    samples = tuple(sample for sample in index.samples if sample.file not in copies)
    return replace(index, samples=samples, left_out=(*index.left_out, *left_out))


def _read_annotated(root: Root, files: list[str]) -> Index:
    images, strays = _listed(root, files)
    there = by_stem(root.images)
    samples, left_out, missing = [], [], []
    unused: Counter[str] = Counter()
    for image in sorted(images.values(), key=lambda i: (i.taken or "", i.burst or "", i.frame, i.name)):
        stem = PurePosixPath(image.name).stem
        path = there.pop(stem.lower(), None)
        domains = sorted({f"location_{location}" for location in image.locations} & set(CARD.domains))
        classes = sorted(image.categories & set(CARD.classes))
        if not domains or not classes:  # as most of what LILA publishes
            why = "show none of the ten classes" if domains else "taken at other locations than the four"
            unused[why] += path is not None
        elif len(image.locations) > 1 or len(classes) > 1:
            where = f"listed at the locations {' and '.join(sorted(image.locations))}"
            why = where if len(image.locations) > 1 else f"annotated as {' and '.join(classes)}"
            left_out += [LeftOut(path, why)] if path else []
        elif path is None:
            missing.append(image.name)
        else:
            label = CARD.classes.index(classes[0])
            samples.append(Sample(stem, path, domains[0], label, group=image.burst, acquired=image.taken))
    left_out += [LeftOut(path, "in no annotation file") for path in there.values()]
    left_out += [LeftOut(f"{count} images", why) for why, count in sorted(unused.items()) if count]
    if strays:
        left_out.append(LeftOut(f"{strays} annotations", "of images that no annotation file lists"))
    return Index(CARD, samples, left_out, missing)


def _listed(root: Root, files: list[str]) -> tuple[dict[Any, _Image], int]:
    """All images of all annotation files by id, and the number of annotations without an image."""
    images: dict[Any, _Image] = {}
    shown: defaultdict[Any, list[str]] = defaultdict(list)
    for path in files:
        try:
            _collect(json.loads(root.read(path)), images, shown)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"{path} in {root.location} is not JSON, or is cut short: {error}.") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(
                f"{path} in {root.location} is not an annotation file of LILA, with images (id, file_name, location), "
                f"annotations (image_id, category_id) and categories (id, name): "
                f"{'it lacks ' if isinstance(error, KeyError) else ''}{error}."
            ) from error
    for id_, image in images.items():
        image.categories.update(shown.pop(id_, ()))
    return images, sum(map(len, shown.values()))


def _collect(content: dict[str, Any], images: dict[Any, _Image], shown: dict[Any, list[str]]) -> None:
    """Add the content of one annotation file; an image may be in several."""
    names = {category["id"]: category["name"] for category in content["categories"]}
    for entry in content["images"]:
        image = images.setdefault(entry["id"], _Image(str(entry["file_name"])))
        image.locations.add(str(entry["location"]))
        image.burst = str(entry["seq_id"]) if entry.get("seq_id") else image.burst
        image.taken = _time(entry.get("date_captured")) or image.taken
        image.frame = int(entry.get("frame_num") or 0)
    for annotation in content["annotations"]:
        if annotation["category_id"] not in names:
            raise KeyError(f"the category {annotation['category_id']}")
        shown[annotation["image_id"]].append(names[annotation["category_id"]])


def _time(text: Any) -> str | None:
    """A time that sorts as text; None if it cannot be read."""
    try:
        return datetime.fromisoformat(str(text)).isoformat()
    except ValueError:
        return None
