"""Description of a data set, known before a byte of it is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DatasetCard:
    """Description of a data set. A user's own data have no fixed domains, classes or counts."""

    name: str
    title: str
    layout: str  # what a root holds, in words
    licence: str
    source: str  # where to get it
    domains: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)  # published images per domain
    total: int | None = None  # published images in total, if the counts per domain are not known
    views: tuple[str, ...] = ("hflip",)  # those that leave every label true
    group: str = ""  # what a split keeps together: slide, patient, lesion
    subgroups: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()  # domains for testing only: no expert is trained on them
    parts: tuple[str, ...] = ()  # the publisher's own splits
    part_counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # published images per part and domain
    overlap: str = ""  # what two domains share that they should not
    may_lack_classes: bool = False  # published with classes that are absent from some domain
    notes: str = ""

    @property
    def images(self) -> int:
        return sum(self.counts.values()) or self.total or 0

    def to_json(self) -> dict[str, Any]:
        listed = ("domains", "classes", "views", "subgroups", "outside", "parts")
        plain = {key: value for key, value in vars(self).items() if key not in (*listed, "counts", "part_counts")}
        return {**plain, **{key: list(getattr(self, key)) for key in listed}, "counts": dict(self.counts)}
