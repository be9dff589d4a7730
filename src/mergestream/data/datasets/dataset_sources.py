"""Where a data set comes from: files on disk, which can be verified, or a generator."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mergestream.data.datasets.decoding import Decoding, decode, fill
from mergestream.data.datasets.domain_data import Dataset, DomainData
from mergestream.data.datasets.index import DatasetCard, Index, Sample
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.verification_report import file_facts
from mergestream.networks.preprocessing import Preprocessing
from mergestream.runtime.errors import DataError, InputError, some, unknown_name
from mergestream.runtime.option_checks import whole_number
from mergestream.runtime.parallel import Track, quiet

Reader = Callable[..., Index]


def no_standin(folder: Path) -> None:
    raise InputError(f"This data set has no stand-in, so nothing is written to {folder}.")


@dataclass(frozen=True)
class FileSource:
    """A data set on disk: how to read its index, and how to write a tiny stand-in of its layout."""

    card: DatasetCard
    read: Reader
    write_standin: Callable[[Path], None] = no_standin
    default_part: str = "all"

    def index(self, root: str | Path | Root | None, *, part: str | None = None, **options: Any) -> tuple[Root, Index]:
        """Index all samples under a root, or those of one of the publisher's splits (`part`)."""
        name = self.card.name
        if root is None:
            raise InputError(f"'{name}' needs root=, its folder or zip: {self.card.layout}")
        if part is not None and not self.card.parts:
            raise InputError(f"'{name}' has no published splits, so it takes no part=.")
        require_options(name, options, self.options())
        opened = root if isinstance(root, Root) else Root(root)
        return opened, self.read(opened, **options).only(part or self.default_part, explicit=part is not None)

    def options(self) -> list[str]:
        """Names of the reader's options, besides the root."""
        return [*list(inspect.signature(self.read).parameters)[1:], *(["part"] if self.card.parts else [])]

    def load(
        self,
        root: str | Path | None,
        *,
        size: int | tuple[int, int] = 224,
        interpolation: str = "bilinear",
        cache_folder: str | Path | None = None,
        skip_bad: int = 0,
        allow_missing_classes: bool = False,
        workers: int = 0,
        on_image: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> Dataset:
        """Open a data set. A domain is decoded to `size` on first use; `cache_folder` keeps the arrays on disk.

        Up to `skip_bad` images that are missing or unreadable are left out; more than that is an error.
        """
        opened, index = self.index(root, **options)
        index.require_usable(allow_missing_classes=allow_missing_classes)
        # Checks size and interpolation.
        shape = Preprocessing((size, size) if isinstance(size, int) else size, interpolation).size
        folder = None if cache_folder is None else Path(cache_folder)
        how = Decoding(shape, interpolation, index.crop_border, folder, workers)
        whole_number("skip_bad", skip_bad, low=0)
        bad = [f"{file}: is missing" for file in index.missing]

        def require_few_bad_images() -> None:
            if len(bad) > skip_bad:
                raise DataError(
                    f"{len(bad)} images of '{self.card.name}' are missing or cannot be read: {some(bad)}. Restore "
                    f"them, or leave them out with --skip-bad {len(bad)} (skip_bad={len(bad)})."
                )

        require_few_bad_images()

        @cache
        def read_domain(domain: str) -> DomainData:
            samples = index.of(domain)
            images, unreadable = decode(opened, samples, how, on_image)
            bad.extend(f"{samples[position].file}: {why}" for position, why in unreadable.items())
            require_few_bad_images()
            if len(unreadable) == len(samples):
                raise DataError(f"No image of the domain '{domain}' of '{self.card.name}' can be read.")
            good = [position for position in range(len(samples)) if position not in unreadable]
            images = images[good] if unreadable else images
            fields = _sample_fields([samples[position] for position in good])
            return DomainData(self.card.name, domain, index.card.classes, images, **fields)

        return Dataset(
            self.card.name,
            index.card.classes,
            index.card.domains,
            self.card.views,
            False,
            read_domain,
            index.card.outside,
            index.card.overlap,
            tuple(index.left_out),
            dict(Counter(sample.domain for sample in index.samples)),
        )


def _sample_fields(samples: list[Sample]) -> dict[str, Any]:
    """The samples' labels, ids and groups as fields of `DomainData`."""
    acquired = [sample.acquired for sample in samples]
    groups = [sample.group for sample in samples]
    kinds = sorted({kind for sample in samples for kind in sample.subgroups})
    return {
        "labels": torch.tensor([sample.label for sample in samples]),
        "acquired": None if None in acquired else acquired,
        "ids": [sample.id for sample in samples],
        # A sample without a group is its own group.
        "groups": None if set(groups) == {None} else [s.group or f"id:{s.id}" for s in samples],
        "subgroups": {kind: [sample.subgroups.get(kind, "unknown") for sample in samples] for kind in kinds},
    }


def require_options(dataset: str, names: Iterable[str], allowed: Sequence[str]) -> None:
    for option in names:
        if option not in allowed:
            raise unknown_name(f"option of '{dataset}'", option, allowed)


@dataclass(frozen=True)
class DataVerification:
    """What is under a root, compared with what was published."""

    index: Index
    location: str
    unreadable: tuple[str, ...]
    files: Mapping[str, Any]  # of `file_facts`

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
            "files": dict(self.files),
        }


def verify(source: FileSource, root: str | Path, track: Track = quiet, **options: Any) -> DataVerification:
    """Read the index, and decode every image once."""
    opened, index = source.index(root, **options)
    with track("reading every image", len(index.samples)) as advance:
        bad = fill(None, opened, index.samples, Decoding(), advance)
    reasons = tuple(f"{index.samples[position].file}: {why}" for position, why in bad.items())
    return DataVerification(index, str(opened.location), reasons, file_facts(opened, index))


@dataclass(frozen=True)
class GeneratedSource:
    """A data set that is computed, not read from disk."""

    card: DatasetCard
    generate: Callable[..., Dataset]

    def load(self, root: str | Path | None, **options: Any) -> Dataset:
        if root is not None:
            raise InputError(f"'{self.card.name}' is generated: it takes no root folder.")
        require_options(self.card.name, options, self.options())
        return self.generate(**options)

    def options(self) -> list[str]:
        return list(inspect.signature(self.generate).parameters)


DatasetSource = FileSource | GeneratedSource
