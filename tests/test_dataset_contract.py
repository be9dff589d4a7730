"""One contract over the whole data-set table: every loader on its own stand-in, as a folder and as a zip."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import mergestream as ms
from mergestream.data.datasets import DATASETS, phantom
from mergestream.data.datasets.dataset_sources import FileSource
from mergestream.testing import check_dataset

ON_DISK = [name for name, source in DATASETS.items() if isinstance(source, FileSource)]
PIXELS = 20


@pytest.fixture(scope="module")
def standins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in ON_DISK:
        folders[name] = tmp_path_factory.mktemp(name)
        DATASETS[name].write_standin(folders[name])
    return folders


def load(name: str, standins: dict[str, Path]) -> ms.Dataset:
    if name not in ON_DISK:
        return ms.load_dataset(name, images=40)
    return ms.load_dataset(name, root=standins[name], size=PIXELS)


@pytest.mark.parametrize("name", list(DATASETS))
def test_contract(name: str, standins: dict[str, Path]) -> None:
    dataset = check_dataset(name, standins[name], size=PIXELS) if name in ON_DISK else check_dataset(name, images=40)
    for domain in (*dataset, *dataset.outside):
        images = dataset[domain].images
        assert len(images.unique(dim=0)) == len(images)  # no image is another's copy
    with pytest.raises(ms.MergestreamError, match="There is no domain"):
        dataset["nowhere"]


@pytest.mark.parametrize("name", ON_DISK)
def test_a_zip_holds_the_same_data_as_the_folder(name: str, standins: dict[str, Path], tmp_path: Path) -> None:
    """Also where the zip holds one more folder around everything, as most downloads do."""
    folder, zipped = load(name, standins), tmp_path / f"{name}.zip"
    shutil.make_archive(str(zipped.with_suffix("")), "zip", standins[name].parent, standins[name].name)
    dataset = ms.load_dataset(name, root=zipped, size=PIXELS)
    for domain in (*folder, *folder.outside):
        assert dataset[domain].fingerprint() == folder[domain].fingerprint()


@pytest.mark.parametrize("name", ON_DISK)
def test_a_wrong_root_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ms.MergestreamError, match="needs root="):
        ms.load_dataset(name)
    with pytest.raises(ms.MergestreamError, match="nothing at"):
        ms.load_dataset(name, root=tmp_path / "nowhere")
    with pytest.raises(ms.MergestreamError, match=str(tmp_path)):
        ms.load_dataset(name, root=tmp_path)
    (tmp_path / "holiday.txt").write_text("sun")
    with pytest.raises(ms.MergestreamError, match="holiday"):
        ms.load_dataset(name, root=tmp_path)
    (tmp_path / "no.zip").write_text("not a zip")
    with pytest.raises(ms.MergestreamError, match="readable zip"):
        ms.load_dataset(name, root=tmp_path / "no.zip")


@pytest.mark.parametrize("name", ON_DISK)
def test_an_unknown_option_is_refused(name: str, standins: dict[str, Path]) -> None:
    with pytest.raises(ms.MergestreamError, match="option of"):
        ms.load_dataset(name, root=standins[name], colour="red")


@pytest.mark.parametrize("name", ON_DISK)
def test_an_unreadable_image_stops_unless_it_is_allowed(name: str, standins: dict[str, Path], tmp_path: Path) -> None:
    whole = load(name, standins)
    shutil.copytree(standins[name], tmp_path / "root")
    _, index = DATASETS[name].index(tmp_path / "root")
    victim = index.samples[0]
    if victim.array:
        pytest.skip(f"'{name}' keeps its images in arrays")
    (tmp_path / "root" / victim.file).write_bytes(b"not an image")
    with pytest.raises(ms.MergestreamError, match=rf"1 images of '{name}' .*--skip-bad 1"):
        ms.load_dataset(name, root=tmp_path / "root", size=PIXELS)[victim.domain]
    allowed = ms.load_dataset(name, root=tmp_path / "root", size=PIXELS, skip_bad=1)[victim.domain]
    assert len(allowed) == len(whole[victim.domain]) - 1
    assert victim.id not in allowed.ids


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
