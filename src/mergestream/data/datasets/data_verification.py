"""Check of a copy on disk: what is missing or unreadable, and which counts differ from the published ones."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.data.datasets.dataset_sources import FileSource
from mergestream.data.datasets.decoding import unreadable
from mergestream.data.datasets.index import LeftOut


@dataclass(frozen=True)
class DataVerification:
    """What is under a root, compared with what was published."""

    name: str
    location: str
    classes: tuple[str, ...]
    counts: dict[str, dict[str, int]]  # usable images by domain and class
    published: dict[str, int]  # images by domain, if published
    total: int | None  # published images in total, if the counts per domain are not published
    images_found: int
    missing: tuple[str, ...]
    unreadable: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    overlap: str
    may_lack_classes: bool

    @property
    def usable(self) -> int:
        return sum(self.in_domain(domain) for domain in self.counts) - len(self.unreadable)

    def in_domain(self, domain: str) -> int:
        return sum(self.counts[domain].values())

    @property
    def differing(self) -> dict[str, tuple[int, int]]:
        """Domains whose count is not the published one: usable, published."""
        usable = {domain: self.in_domain(domain) if domain in self.counts else 0 for domain in self.published}
        return {d: (usable[d], self.published[d]) for d in self.published if usable[d] != self.published[d]}

    @property
    def lacking(self) -> dict[str, list[str]]:
        """Classes without any image, per domain."""
        empty = {d: [name for name, count in counts.items() if not count] for d, counts in self.counts.items()}
        return {domain: names for domain, names in empty.items() if names}

    @property
    def complete(self) -> bool:
        """Every file present and readable, every count as published, every class in every domain if it should be."""
        short = self.total is not None and self.total != self.usable
        lacking = self.lacking and not self.may_lack_classes
        return self.usable > 0 and not (self.missing or self.unreadable or self.differing or lacking or short)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "root": self.location,
            "complete": self.complete,
            "images_found": self.images_found,
            "usable": self.usable,
            "counts": self.counts,
            "published": self.published,
            "published_total": self.total,
            "differing": {d: {"found": a, "published": b} for d, (a, b) in self.differing.items()},
            "classes_without_images": self.lacking,
            "missing": list(self.missing),
            "unreadable": list(self.unreadable),
            "left_out": [vars(each) for each in self.left_out],
            "overlap": self.overlap,
        }


def verify(
    source: FileSource,
    root: str | Path,
    track: Callable[[str, int], AbstractContextManager[Callable[[], None]]] = lambda *_: nullcontext(lambda: None),
    **options: Any,
) -> DataVerification:
    """Read the index, and decode every image once."""
    opened, index = source.index(root, **options)
    with track("reading every image", len(index.samples)) as advance:
        bad = unreadable(opened, index.samples, advance)
    expected = index.card.counts if index.expected is None else index.expected
    shown = (*index.domains, *index.outside)
    return DataVerification(
        index.card.name,
        str(opened.location),
        index.classes,
        index.counts(),
        # A domain that only tests may be absent altogether.
        {d: n for d, n in expected.items() if d in shown or d not in index.card.outside},
        index.total,
        index.images_found,
        index.missing,
        tuple(f"{index.samples[position].file}: {why}" for position, why in bad.items()),
        index.left_out,
        index.card.overlap,
        index.card.may_lack_classes,
    )
