"""Images in folders domain/class/image: PACS, VLCS and Office-Home as DomainBed arranges them, and HISTOPANTUM."""

import re
from collections.abc import Callable
from pathlib import PurePosixPath

from mergestream.data.datasets.index import CARDS, DatasetCard, Index, LeftOut, Sample
from mergestream.data.datasets.roots import IMAGES, Root
from mergestream.runtime.errors import DataError


def read_tree(root: Root, card: DatasetCard, group_of: Callable[[str], str | None] = lambda _: None) -> Index:
    """Index a published tree, wherever it starts under the root. Mirrors may spell names differently."""
    folder, domains = _search(root, card)
    absent = [domain for domain in card.domains if domain not in domains]
    if absent:
        contents = f"{folder or 'it'} lacks {', '.join(absent)}" if domains else ""
        raise root.refused(card.name, f"the folders {', '.join(card.domains)}, each with a folder per class", contents)
    class_names = _by_spelling(card, card.classes)
    samples, left_out = [], []
    for domain in card.domains:
        home = _unwrapped(root, domains[domain])
        for path in root.under(home):
            inside = PurePosixPath(path).relative_to(home)
            name = class_names.get(plain_name(inside.parts[0])) if len(inside.parts) > 1 else None
            if name is None:
                left_out.append(LeftOut(path, f"'{inside.parts[0]}' is not a class of '{card.name}'"))
            elif inside.suffix.lower() not in IMAGES:
                left_out.append(LeftOut(path, "not an image file"))
            else:
                id_ = PurePosixPath(domain, name, *inside.parts[1:]).as_posix()
                label = card.classes.index(name)
                samples.append(Sample(id_, path, domain, label, group=group_of(inside.stem)))
    return Index(card, samples, left_out)


def has_tree(root: Root, card: DatasetCard) -> bool:
    return len(_search(root, card)[1]) == len(card.domains)


def _unwrapped(root: Root, folder: str) -> str:
    """A zip per domain often holds one folder with the zip's own name."""
    twice = f"{folder}/{PurePosixPath(folder).name}"
    return twice if len(root.under(twice)) == len(root.under(folder)) else folder


def _search(root: Root, card: DatasetCard) -> tuple[str, dict[str, str]]:
    """The folder with most of the domains, the shallowest first, and the path of each domain."""
    domain_names = _by_spelling(card, card.domains)
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


def _by_spelling(card: DatasetCard, names: tuple[str, ...]) -> dict[str, str]:
    return {plain_name(way): name for name in names for way in (name, *card.spellings.get(name, ()))}


def plain_name(name: str) -> str:
    """Normalise a name: Real World, Real_World and real-world are the same."""
    return re.sub(r"[\s_-]+", "_", name.strip().lower())


PACS, VLCS, OFFICE_HOME, HISTOPANTUM = (CARDS[n] for n in ("pacs", "vlcs", "office_home", "histopantum"))


TCGA_CASE = re.compile(r"TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}(?![A-Z0-9])", re.IGNORECASE)


def case_of(stem: str) -> str | None:
    """`TCGA-3L-AA1B` of `TCGA-3L-AA1B-01Z-00-DX1_10240_15360`."""
    case = TCGA_CASE.match(stem)
    return case.group().upper() if case else None
