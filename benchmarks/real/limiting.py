"""A small copy of a data set's zip, for a try: so many images of every domain, all classes alike."""

import zipfile
from collections import defaultdict
from pathlib import Path

from mergestream.data.datasets import file_source_of
from mergestream.data.datasets.index import Index


def limited(dataset: str, root: Path, limit: int, folder: Path) -> Path:
    """A zip with about `limit` images a domain; tables keep only the rows of images that stay."""
    path = folder / f"{dataset}-{limit}.zip"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _, index = file_source_of(dataset).index(root)
        half = path.with_suffix(".part")
        _copy(root, half, _chosen(index, limit))
        half.rename(path)
    return path


def _chosen(index: Index, limit: int) -> dict[str, str]:
    """File -> id, evenly spread over every class of every domain: over many slides, not those of the first."""
    kinds: defaultdict[tuple[str, int], list[tuple[str, str]]] = defaultdict(list)
    for sample in index.samples:
        kinds[sample.domain, sample.label].append((sample.file, sample.id))
    wanted = -(-limit // len(index.classes))
    return dict(each for own in kinds.values() for each in own[:: max(1, len(own) // wanted)][:wanted])


def _copy(root: Path, path: Path, chosen: dict[str, str]) -> None:
    stay = set(chosen.values())
    with zipfile.ZipFile(root) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            if name in chosen:
                new.writestr(name, old.read(name))
            elif name.endswith(".csv"):
                head, *lines = old.read(name).decode("utf-8").splitlines()
                kept = [line for line in lines if line.split(",", 1)[0] in stay]
                new.writestr(name, "\n".join([head, *kept]) + "\n")
