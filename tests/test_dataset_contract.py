"""One contract over the whole data-set table."""

import numpy as np
import pytest
import torch

import mergestream as ms
from mergestream.datasets import DATASETS, phantom
from mergestream.views import VIEWS

SMALL: dict[str, dict] = {"phantom": {"images": 40}}


@pytest.mark.parametrize("name", list(DATASETS))
def test_contract(name: str) -> None:
    dataset = ms.load_dataset(name, **SMALL[name])
    again = ms.load_dataset(name, **SMALL[name])
    assert dataset.name == name
    assert len(dataset) == len(dataset.domains) == len(set(dataset.domains)) >= 2
    assert set(dataset.views) <= set(VIEWS)
    for domain in dataset:
        data = dataset[domain]
        assert data.images.dtype == torch.uint8
        assert data.images.shape[1] == 3
        assert data.labels.dtype == torch.int64
        assert data.classes == dataset.classes
        assert sum(data.class_counts().values()) == len(data) == len(data.labels)
        assert data.fingerprint() == again[domain].fingerprint()
        assert torch.equal(data.batch(torch.tensor([1, 0])), data.images[[1, 0]])
    assert len({dataset[domain].fingerprint() for domain in dataset}) == len(dataset)
    with pytest.raises(ms.MergestreamError, match="There is no domain"):
        dataset["nowhere"]


def test_phantom_hospitals_differ_in_acquisition_not_in_classes() -> None:
    dataset = ms.load_dataset("phantom", images=120)
    colours = np.array([dataset[d].images.float().mean(dim=(0, 2, 3)).numpy() for d in dataset])
    distances = [np.abs(a - b).max() for i, a in enumerate(colours) for b in colours[:i]]
    assert min(distances) > 10  # grey levels between any two hospitals' mean colours
    for domain in dataset:
        assert min(dataset[domain].class_counts().values()) > 0
        assert list(dataset[domain].acquired) == list(range(120))


def test_phantom_seeds_are_other_patients() -> None:
    one, two = (phantom.hospital("lyon", 20, seed) for seed in (0, 1))
    assert one.fingerprint() != two.fingerprint()
    assert phantom.archive(30, 0).classes != phantom.CLASSES


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ms.MergestreamError, match="Did you mean 'phantom'"):
        ms.load_dataset("phantoms")
    with pytest.raises(ms.MergestreamError, match="takes no root"):
        ms.load_dataset("phantom", root="data")
    with pytest.raises(ms.MergestreamError, match="at least 8 images"):
        ms.load_dataset("phantom", images=3)
    images, labels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    for bad in (
        {"images": images.float()},
        {"labels": labels[:1]},
        {"labels": torch.tensor([0, 5])},
        {"labels": torch.tensor([-1, 0])},
    ):
        with pytest.raises(ms.MergestreamError):
            ms.DomainData("d", "x", ("a", "b"), **{"images": images, "labels": labels, **bad})
