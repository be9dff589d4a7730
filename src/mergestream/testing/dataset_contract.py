"""Run the contract on a data set: its card, its domains, and the same bits whenever it is opened."""

from pathlib import Path
from typing import Any

import torch

from mergestream.data.datasets import Dataset, DatasetCard, DomainData, FileSource, GeneratedSource, source_of
from mergestream.networks.preprocessing import VIEWS
from mergestream.testing.method_case import require


def check_dataset(
    source: str | FileSource | GeneratedSource, root: str | Path | None = None, **options: Any
) -> Dataset:
    """Open a data set and check it against the rules of all data sets; the first broken one is an AssertionError.

    A name, registered or ours, or a source; `root` and options as in `mergestream.load_dataset`. Its images are all
    read, so give a small part of a large set. Returns the opened data set.
    """
    source = source_of(source) if isinstance(source, str) else source
    where = f"The data set '{source.card.name}' breaks the rule"
    try:
        dataset, again = (source.load(None if root is None else str(root), **options) for _ in range(2))
        _check_card(dataset, source.card)
        for domain in (*dataset, *dataset.outside):
            _check_domain(dataset, dataset[domain], source.card, domain)
            equal = dataset[domain].fingerprint() == again[domain].fingerprint()
            require(equal, f"'the same bits every time': '{domain}' differs when the data set is opened again.")
        _check_apart(dataset)
    except AssertionError as broken:
        raise AssertionError(f"{where} {broken}") from broken
    return dataset


def _check_card(dataset: Dataset, card: DatasetCard) -> None:
    rule = "'the card describes the data'"
    require(dataset.name == card.name, f"{rule}: the data call themselves '{dataset.name}'.")
    for field in ("title", "licence", "source"):
        require(getattr(card, field), f"{rule}: its card has no {field}.")
    for field in ("domains", "classes"):
        stated, present = getattr(card, field), getattr(dataset, field)
        require(stated in ((), present), f"{rule}: its card names the {field} {stated}, the data have {present}.")
    enough = len(dataset.domains) == len(set(dataset.domains)) >= 2
    require(enough, f"'two domains or more': it has {list(dataset.domains)}.")
    listed = dataset.views and set(dataset.views) <= set(VIEWS)
    require(listed, f"'views leave labels true': name some of {', '.join(VIEWS)}; it has {list(dataset.views)}.")


def _check_domain(dataset: Dataset, data: DomainData, card: DatasetCard, domain: str) -> None:
    rule = f"'domains are images with labels' in '{domain}'"
    require(data.name == domain, f"{rule}: the data call themselves '{data.name}'.")
    require(data.dataset == dataset.name, f"{rule}: the data say that they are of '{data.dataset}'.")
    images, labels = data.images, data.labels
    require(
        images.dtype == torch.uint8 and images.ndim == 4, f"{rule}: images are {images.dtype}, not uint8 [N,3,H,W]."
    )
    require(images.shape[1] == 3, f"{rule}: images have the shape {tuple(images.shape)}, not [N,3,H,W].")
    require(labels.dtype == torch.int64, f"{rule}: labels are {labels.dtype}, not torch.int64.")
    require(data.classes == dataset.classes, f"{rule}: its classes are {data.classes}, not those of the data set.")
    order = torch.tensor([len(data) - 1, 0])
    require(torch.equal(data.batch(order), images[order]), f"{rule}: batch(indices) gives other images.")
    if card.group and domain in dataset.domains:  # outside domains are never split
        groups = set(data.groups or ())
        several = 1 < len(groups) < len(data)
        require(several, f"'groups stay together' in '{domain}': {len(data)} images are in {len(groups)} groups.")
    missing = set(card.subgroups) - set(data.subgroups)
    require(not missing, f"{rule}: the subgroups {', '.join(sorted(missing))} of its card are absent.")


def _check_apart(dataset: Dataset) -> None:
    rule = "'domains are apart'"
    ids = [each for domain in (*dataset, *dataset.outside) for each in dataset[domain].ids or ()]
    require(len(set(ids)) == len(ids), f"{rule}: two images have one id.")
    prints = {dataset[domain].fingerprint() for domain in dataset}
    require(len(prints) == len(dataset), f"{rule}: two of them hold the same images.")
