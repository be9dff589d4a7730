"""The card of a data set, and its samples: where their pixels are and what is known about them. No pixel is read."""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from mergestream.data.datasets.roots import IMAGES
from mergestream.runtime.errors import DataError, some, unknown_name


@dataclass(frozen=True)
class DatasetCard:
    """Description of a data set, from cards.toml. A user's own data have no fixed domains, classes or counts."""

    name: str
    title: str
    layout: str  # what a root holds, in words
    licence: str
    source: str  # where to get it
    domains: tuple[str, ...] = ()  # those that experts are trained on
    classes: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)  # published images per domain
    total: int | None = None  # published images in total, if the counts per domain are not known
    views: tuple[str, ...] = ("hflip",)  # those that leave every label true
    group: str = ""  # what a split keeps together: slide, patient, lesion
    subgroups: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()  # domains for testing only: no expert is trained on them
    parts: tuple[str, ...] = ()  # the publisher's own splits
    part_counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # published images per part and domain
    parts_from: str = ""  # a sentence: which files define the publisher's splits
    overlap: str = ""  # what two domains share that they should not
    may_lack_classes: bool = False  # published with classes that are absent from some domain
    spellings: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of domains and classes in some copies
    errata: Mapping[str, int | str] = field(default_factory=dict)  # corrections of labels, and copies of images
    notes: str = ""
    # What the loader was checked against: 'real files', 'public loader code', 'documented layout', or nothing.
    verified: str = ""
    verified_note: str = ""

    def to_json(self) -> dict[str, Any]:
        shown = vars(self).keys() - {"part_counts", "parts_from", "spellings", "errata"}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items() if k in shown}


def _card(name: str, fields: dict[str, Any]) -> DatasetCard:
    tuples: dict[str, Any] = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    return DatasetCard(name, **fields | tuples)


_TABLES = tomllib.loads(Path(__file__).with_name("cards.toml").read_text(encoding="utf-8"))
CARDS = {name: _card(name, fields) for name, fields in _TABLES.items()}


@dataclass(frozen=True)
class Sample:
    """One image: a file under the root, or one row of an array in such a file."""

    id: str
    file: str
    domain: str
    label: int
    group: str | None = None  # slide, patient or lesion
    acquired: Any = None  # sorts by time of acquisition
    part: str | None = None  # the publisher's split
    subgroups: Mapping[str, str] = field(default_factory=dict)
    array: str | None = None  # name of the array in an .npz or .hdf5 file, and the row
    row: int = 0


@dataclass(frozen=True)
class LeftOut:
    """Something on disk that is not used, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Index:
    """All samples of a data set, in one fixed order."""

    card: DatasetCard
    samples: Sequence[Sample]
    left_out: Sequence[LeftOut] = ()
    missing: Sequence[str] = ()  # named by a table, but not on disk
    crop_border: bool = False  # cut the black frame of a fundus photograph before resizing
    missing_parts: Mapping[str, str] = field(default_factory=dict)  # the split of a missing file, where known

    def __post_init__(self) -> None:
        for name in ("samples", "left_out", "missing"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.card.classes or len(set(self.card.classes)) != len(self.card.classes):
            raise DataError(f"'{self.card.name}' needs distinct classes, got {list(self.card.classes)}.")
        twice = [id_ for id_, count in Counter(sample.id for sample in self.samples).items() if count > 1]
        if twice:
            raise DataError(f"Two images of '{self.card.name}' have one id: {some(twice)}. Keep one of each.")

    @property
    def images_found(self) -> int:
        """Number of images on disk, used or not."""
        return len(self.samples) + sum(PurePosixPath(each.what).suffix.lower() in IMAGES for each in self.left_out)

    @property
    def total(self) -> int | None:
        """Published images in all, where only that is known."""
        return None if self.card.counts else self.card.total

    def of(self, domain: str) -> list[Sample]:
        return [sample for sample in self.samples if sample.domain == domain]

    def counts(self) -> dict[str, dict[str, int]]:
        """Images by domain and class."""
        table = {domain: dict.fromkeys(self.card.classes, 0) for domain in (*self.card.domains, *self.card.outside)}
        for sample in self.samples:
            table[sample.domain][self.card.classes[sample.label]] += 1
        return table

    def only(self, part: str, *, explicit: bool = True) -> "Index":
        """Keep the samples of one published split, or of several joined by '+'; 'all' keeps every sample.

        Outside domains belong to no split and stay. A default part (not `explicit`) also keeps samples without a part.
        """
        if part == "all":
            return replace(self, card=self._card(self.card.parts)) if self.card.part_counts else self
        names, present = part.split("+"), {sample.part for sample in self.samples}
        for name in names:
            if name not in self.card.parts:
                raise unknown_name(f"part of '{self.card.name}'", name, ("all", *self.card.parts))
            if explicit and name not in present:
                why = f"'{self.card.name}' has no image of the part '{name}' under this root."
                raise DataError(f"{why} {self.card.parts_from}".strip())
        keep = {*names} if explicit else {*names, None}
        return replace(
            self,
            samples=tuple(s for s in self.samples if s.part in keep or s.domain in self.card.outside),
            missing=tuple(m for m in self.missing if self.missing_parts.get(m) in (None, *names)),
            card=replace(self._card(names), total=None),
        )

    def _card(self, parts: Sequence[str]) -> DatasetCard:
        """The card with the published counts of these parts together."""
        each = [self.card.part_counts.get(part, {}) for part in parts]
        inside = {d: sum(counts[d] for counts in each) for d in self.card.domains if all(each)}
        outside = {d: self.card.counts[d] for d in self.card.outside if d in self.card.counts}
        return replace(self.card, counts=inside | outside)

    def require_usable(self, *, allow_missing_classes: bool) -> None:
        """Refuse an index with a domain without images, or without images of some class."""
        counts = self.counts()
        empty = [domain for domain in counts if not sum(counts[domain].values())]
        if empty or not counts:
            raise DataError(f"'{self.card.name}' has no image in the domain {some(empty) or '(there is none)'}.")
        if allow_missing_classes or self.card.may_lack_classes:
            return
        for domain in self.card.domains:
            lacking = [name for name, count in counts[domain].items() if not count]
            if lacking:
                raise DataError(
                    f"The domain '{domain}' of '{self.card.name}' has no image of the class {some(lacking)}. If that "
                    f"is right for this site, allow it: --allow-missing-classes, or allow_missing_classes=True."
                )
