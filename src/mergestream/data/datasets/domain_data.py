"""A data set in memory: named domains, each with images, labels and what else is known about a sample."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mergestream.data.datasets.index import LeftOut
from mergestream.runtime.errors import InputError, unknown_name


@dataclass(frozen=True)
class DomainData:
    """One domain: images uint8 [N,3,H,W], labels int64 [N], and what else is known about each sample.

    `acquired` sorts by time of acquisition; `groups` are what a split must not cut (slide, patient, lesion);
    `subgroups` are named partitions that are reported separately, such as the scanner.
    """

    dataset: str
    name: str
    classes: tuple[str, ...]
    images: Tensor
    labels: Tensor
    acquired: Sequence[Any] | None = None
    ids: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    subgroups: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise InputError(f"Images of a domain are uint8 [N,3,H,W], got {self.images.dtype} {self.images.ndim}-d.")
        if len(self.images) != len(self.labels) or len(self.labels) == 0:
            raise InputError(f"The domain '{self.name}' has {len(self.images)} images, {len(self.labels)} labels.")
        if int(self.labels.min()) < 0 or int(self.labels.max()) >= len(self.classes):
            raise InputError(f"The domain '{self.name}' has a label outside 0 to {len(self.classes) - 1}.")
        columns = {"acquired": self.acquired, "ids": self.ids, "groups": self.groups, **self.subgroups}
        for what, values in columns.items():
            if values is not None and len(values) != len(self.labels):
                raise InputError(f"The domain '{self.name}' has {len(self.labels)} labels, {len(values)} of '{what}'.")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, 3, H, W)."""
        return tuple(self.images.shape)

    def batch(self, indices: Tensor) -> Tensor:
        """Images uint8 [B,3,H,W] of some samples, in the order given."""
        # Copies whole rows: ten times as fast as `images[indices]`, which walks over single bytes.
        return self.images.index_select(0, torch.as_tensor(indices))

    def subset(self, indices: Tensor) -> "DomainData":
        """Some of the samples, in the order given."""

        def pick(values: Sequence[Any] | None) -> list[Any] | None:
            return None if values is None else [values[int(i)] for i in indices]

        return replace(
            self,
            images=self.batch(indices),
            labels=self.labels[indices],
            acquired=pick(self.acquired),
            ids=pick(self.ids),
            groups=pick(self.groups),
            subgroups={name: pick(values) or [] for name, values in self.subgroups.items()},
        )

    def class_counts(self) -> dict[str, int]:
        counts = torch.bincount(self.labels, minlength=len(self.classes)).tolist()
        return dict(zip(self.classes, counts, strict=True))

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(repr((self.dataset, self.name, self.classes, self.shape)).encode())
        digest.update(self.images.contiguous().numpy().data)
        digest.update(self.labels.contiguous().numpy().data)
        if self.groups is not None:
            digest.update(repr(list(self.groups)).encode())
        return digest.hexdigest()


def concatenate(parts: Sequence[DomainData]) -> tuple[DomainData, list[str]]:
    """Join several target domains; also return the domain of each sample, which a `mixture` stream needs."""
    if len({part.classes for part in parts}) != 1 or len({part.images.shape[1:] for part in parts}) != 1:
        raise InputError("Domains that are streamed together need one class list and one image size.")
    images, labels = (torch.cat([getattr(part, key) for part in parts]) for key in ("images", "labels"))
    name, first = "+".join(part.name for part in parts), parts[0]
    ids = None if any(part.ids is None for part in parts) else [i for part in parts for i in part.ids or ()]
    shared = set.intersection(*(set(part.subgroups) for part in parts))
    subgroups = {key: [value for part in parts for value in part.subgroups[key]] for key in sorted(shared)}
    groups = [f"{part.name}/{group}" for part in parts for group in part.groups or range(len(part))]
    together = DomainData(
        first.dataset,
        name,
        first.classes,
        images,
        labels,
        ids=ids,
        groups=groups if any(part.groups is not None for part in parts) else None,
        subgroups=subgroups,
    )
    return together, [part.name for part in parts for _ in range(len(part))]


@dataclass(frozen=True)
class Dataset(Mapping[str, DomainData]):
    """Named domains that share one class list. `views` are the ones that leave every label true.

    `outside` are domains for testing only: no expert is trained on them. `overlap` says what domains share that they
    should not; `left_out` lists what is on disk but not used, with the reason.
    """

    name: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    views: tuple[str, ...]
    synthetic: bool
    read_domain: Callable[[str], DomainData]
    outside: tuple[str, ...] = ()
    overlap: str = ""
    left_out: tuple[LeftOut, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # images per domain, if known before reading

    def __getitem__(self, domain: str) -> DomainData:
        if domain not in (*self.domains, *self.outside):
            raise unknown_name(f"domain in '{self.name}'", domain, (*self.domains, *self.outside))
        return self.read_domain(domain)

    def __repr__(self) -> str:
        outside = f"; outside: {', '.join(self.outside)}" if self.outside else ""
        return f"Dataset({self.name}: {', '.join(self.domains)}; {len(self.classes)} classes{outside})"

    def __iter__(self) -> Any:
        return iter(self.domains)

    def __len__(self) -> int:
        return len(self.domains)
