"""Check of a copy on disk: what is missing or unreadable, and which counts differ from the published ones."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.data.datasets.dataset_sources import FileSource
from mergestream.data.datasets.decoding import Decoding, fill
from mergestream.data.datasets.index import Index


@dataclass(frozen=True)
class DataVerification:
    """What is under a root, compared with what was published."""

    index: Index
    location: str
    unreadable: tuple[str, ...]

    @property
    def published(self) -> dict[str, int]:
        """Images by domain, if published."""
        return dict(self.index.card.counts)

    @property
    def usable(self) -> int:
        return len(self.index.samples) - len(self.unreadable)

    @property
    def differing(self) -> dict[str, tuple[int, int]]:
        """Domains whose count is not the published one: usable, published."""
        usable = {domain: len(self.index.of(domain)) for domain in self.published}
        return {d: (usable[d], self.published[d]) for d in usable if usable[d] != self.published[d]}

    @property
    def lacking(self) -> dict[str, list[str]]:
        """Classes without any image, per domain."""
        empty = {d: [name for name, count in counts.items() if not count] for d, counts in self.index.counts().items()}
        return {domain: names for domain, names in empty.items() if names}

    @property
    def complete(self) -> bool:
        """Every file present and readable, every count as published, every class in every domain if it should be."""
        short = self.index.total is not None and self.index.total != self.usable
        lacking = self.lacking and not self.index.card.may_lack_classes
        return self.usable > 0 and not (self.index.missing or self.unreadable or self.differing or lacking or short)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.index.card.name,
            "root": self.location,
            "complete": self.complete,
            "images_found": self.index.images_found,
            "usable": self.usable,
            "counts": self.index.counts(),
            "published": self.published,
            "published_total": self.index.total,
            "differing": {d: {"found": a, "published": b} for d, (a, b) in self.differing.items()},
            "classes_without_images": self.lacking,
            "missing": list(self.index.missing),
            "unreadable": list(self.unreadable),
            "left_out": [vars(each) for each in self.index.left_out],
            "overlap": self.index.card.overlap,
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
        bad = fill(None, opened, index.samples, Decoding(), advance)
    reasons = tuple(f"{index.samples[position].file}: {why}" for position, why in bad.items())
    return DataVerification(index, str(opened.location), reasons)
