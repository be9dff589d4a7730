"""The organs of MedIMeta and of MedMNIST: odd corners of their formats."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import mergestream as ms
from mergestream.data.datasets import DATASETS, organs
from mergestream.data.datasets.medimeta import find_medimeta, read_medimeta
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.standins.fake_organs import FakeImage, write_medimeta, write_organ_mnist, write_organs
from mergestream.data.datasets.table_files import array_shape, read_array
from mergestream.runtime.errors import DataError

TASK = "organ label"


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("organs")
    write_organs(folder)
    return folder


@pytest.fixture
def copy(standin: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(standin, tmp_path / "copy"))


def small(folder: Path) -> Path:
    """Three images of 4x4 whose grey value is their number."""
    rows = [FakeImage(np.full((4, 4), n, dtype=np.uint8), n % 2, ("train", "val", "test")[n]) for n in range(3)]
    write_medimeta(folder, "pathology", ("benign", "malignant"), rows)
    return folder


def test_every_image_gets_its_own_label_part_and_annotations(standin: Path) -> None:
    entries = read_medimeta(Root(standin), "organs_coronal", TASK)
    assert [entry.sample.label for entry in entries] == list(range(11)) * 5
    assert [entry.label_name for entry in entries] == list(organs.ORGANS.classes) * 5
    one = entries[23]  # the second organ of the third scan
    assert one.sample.id == "organs_coronal/000023"
    assert one.sample.file.endswith("organs_coronal/images/000023.tiff")
    assert (one.sample.array, one.sample.row, one.sample.part) == (None, 0, "val")
    assert one.annotations["organ_name"] == "left lung"


def test_pixels_are_those_of_the_file_and_grey(standin: Path) -> None:
    data = ms.load_dataset("organs", root=standin, size=24)["axial"]
    with Image.open(standin / "organs_axial" / "images" / "000030.tiff") as image:
        assert image.mode == "L"
        assert torch.equal(data.images[30], torch.from_numpy(np.array(image)).expand(3, 24, 24))


def test_hdf5_serves_where_there_are_no_tiffs(standin: Path, copy: Path) -> None:
    for plane in organs.PLANES:
        shutil.rmtree(copy / f"organs_{plane}" / "images")
    entries = read_medimeta(Root(copy), "organs_sagittal", TASK)
    assert [(entry.sample.array, entry.sample.row) for entry in entries] == [("images", n) for n in range(55)]
    whole, packed = (ms.load_dataset("organs", root=root, size=20) for root in (standin, copy))
    for plane in organs.PLANES:
        assert packed[plane].fingerprint() == whole[plane].fingerprint()
        assert list(packed[plane].ids) == list(whole[plane].ids)


def test_parts_are_the_publishers_and_keep_scans_apart(standin: Path) -> None:
    scans = {}
    for part, count in (("train", 22), ("val", 11), ("test", 22), ("train+val", 33)):
        dataset = ms.load_dataset("organs", root=standin, size=8, part=part)
        assert [len(dataset[plane]) for plane in organs.PLANES] == [count] * 3
        scans[part] = {plane: set(dataset[plane].groups) for plane in organs.PLANES}
    assert scans["train"]["axial"] == {"volume-0", "volume-1"}
    assert scans["test"]["sagittal"] == {"test-volume-0", "test-volume-1"}
    assert not scans["train+val"]["axial"] & scans["test"]["coronal"]
    assert "'train+val'" in dataset.overlap


def test_no_view_flips_left_and_right() -> None:
    assert organs.ORGANS.views == organs.ORGAN_MNIST.views == ("brightness",)
    assert [name for name in organs.ORGANS.classes if "left" in name] == [
        "left lung",
        "left kidney",
        "left femoral head",
    ]


def test_published_counts_agree_with_their_parts() -> None:
    for about in (organs.ORGANS, organs.ORGAN_MNIST):
        for domain in about.domains:
            assert sum(about.part_counts[part][domain] for part in about.parts) == about.counts[domain]
    assert sum(organs.ORGAN_MNIST.counts.values()) == 107_624
    assert sum(organs.ORGANS.counts.values()) == 3 * 1645


def test_a_zip_per_folder_is_found_too(standin: Path, tmp_path: Path) -> None:
    for plane in organs.PLANES:
        shutil.make_archive(str(tmp_path / f"organs_{plane}"), "zip", standin, f"organs_{plane}")
    _, index = DATASETS["organs"].index(tmp_path)
    assert len(index.samples) == 165
    assert index.samples[0].file == "organs_axial/organs_axial/images/000000.tiff"


def test_a_folder_of_another_name_is_known_by_its_id(tmp_path: Path) -> None:
    small(tmp_path / "mammo_mass").rename(tmp_path / "unpacked")
    root = Root(tmp_path)
    assert find_medimeta(root, "mammo_mass") == "unpacked"
    assert find_medimeta(root, "mammo_calc") is None
    assert [entry.sample.id for entry in read_medimeta(root, "mammo_mass", "pathology")][-1] == "mammo_mass/000002"


def test_two_copies_of_one_folder_are_refused(copy: Path) -> None:
    shutil.copytree(copy / "organs_axial", copy / "old" / "organs_axial")
    with pytest.raises(DataError, match=r"organs_axial twice: .*old/organs_axial"):
        ms.load_dataset("organs", root=copy)


def test_a_missing_plane_is_named(copy: Path) -> None:
    shutil.rmtree(copy / "organs_sagittal")
    with pytest.raises(DataError, match=r"folder organs_sagittal .* it holds organs_axial, organs_coronal"):
        ms.load_dataset("organs", root=copy)


def test_an_unknown_task_names_those_there(standin: Path) -> None:
    with pytest.raises(ms.MergestreamError, match=r"no task in organs_axial/info.yaml called 'organ'.*organ label"):
        read_medimeta(Root(standin), "organs_axial", "organ")


def test_a_group_comes_only_from_a_column_that_names_one(copy: Path) -> None:
    for plane in organs.PLANES:
        path = copy / f"organs_{plane}" / "annotations.csv"
        path.write_text(path.read_text().replace("original_filepath", "something else"))
    assert ms.load_dataset("organs", root=copy, size=8)["axial"].groups is None
    path.write_text(path.read_text().replace("something else", "Subject ID"))
    dataset = ms.load_dataset("organs", root=copy, size=8)
    assert dataset["axial"].groups is None
    assert len(set(dataset["sagittal"].groups)) == 5
    path.unlink()
    assert ms.load_dataset("organs", root=copy, size=8)["sagittal"].groups is None


def test_damaged_medimeta_folders_are_refused_in_a_sentence(tmp_path: Path) -> None:
    def after(change: object, match: str) -> None:
        folder = small(tmp_path / "mammo_mass")
        change(folder)
        with pytest.raises(DataError, match=match):
            read_medimeta(Root(tmp_path), "mammo_mass", "pathology")
        shutil.rmtree(folder)

    def write(name: str, text: str) -> object:
        return lambda folder: (folder / name).write_text(text)

    def label(values: object) -> object:
        return lambda folder: np.save(folder / "task_labels" / "pathology.npy", np.array(values))

    after(label([0, 1]), r"2 labels but 3 images")
    after(label([0, 1, 0, 1]), r"4 labels but 3 images.*missing is 000003")
    after(label([0, 1, 2]), r"from 0 to 2; 2 are known")
    after(label([0, -1, 1]), r"from -1 to 1")
    after(label([0.0, 1.0, 0.0]), r"one number per image: float64")
    after(label([[0, 1]] * 3), r"one number per image")
    after(lambda folder: np.save(folder / "task_labels" / "pathology.npy", np.array([{}] * 3)), "allow_pickle=False")
    after(lambda folder: (folder / "task_labels" / "pathology.npy").unlink(), r"no file .*pathology\.npy")
    after(lambda folder: (folder / "images" / "000001.tiff").unlink(), r"3 labels but 2 images.*missing is 000001")
    after(write("images/notes.png", "x"), r"notes.png .* is no MedIMeta image")
    after(write("splits/test.txt", "images/000003.tiff"), r"test.txt .* names images/000003.tiff, but there are 3")
    after(write("splits/test.txt", "images/last.tiff"), r"images/last.tiff .*no MedIMeta image")
    after(write("splits/test.txt", "images/000000.tiff"), r"in two splits: train and test")
    after(write("info.yaml", "tasks: [unclosed"), r"is not YAML")
    bad = yaml.safe_dump({"tasks": [{"task_name": "pathology", "labels": {1: "benign", 2: "malignant"}}]})
    after(write("info.yaml", bad), r"does not number the labels")
    after(write("annotations.csv", "path\nimages/000000.tiff\n"), r"lacks the column filepath")

    def nothing_left(folder: Path) -> None:
        shutil.rmtree(folder / "images")
        (folder / "images.hdf5").unlink()

    after(nothing_left, r"neither mammo_mass/images/ nor mammo_mass/images.hdf5")

    def short_hdf5(folder: Path) -> None:
        shutil.rmtree(folder / "images")
        label([0, 1, 0, 1])(folder)

    after(short_hdf5, r"4 labels but 3 rows")

    def no_hdf5(folder: Path) -> None:
        shutil.rmtree(folder / "images")
        (folder / "images.hdf5").write_bytes(b"nothing")

    after(no_hdf5, r"Cannot read the array 'images' of mammo_mass/images.hdf5")


def test_renamed_organs_are_refused(copy: Path) -> None:
    path = copy / "organs_coronal" / "info.yaml"
    path.write_text(path.read_text().replace("spleen", "stomach"))
    with pytest.raises(DataError, match=r"organs_coronal .* other labels than published"):
        ms.load_dataset("organs", root=copy)


# MedMNIST


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    folder = tmp_path / "mnist"
    folder.mkdir()
    write_organ_mnist(folder)
    return folder


def change(path: Path, **arrays: np.ndarray | None) -> None:
    with np.load(path) as stored:
        changed = {**stored, **arrays}
    np.savez_compressed(path, **{name: array for name, array in changed.items() if array is not None})


def test_rows_labels_and_parts_of_npz(mnist: Path) -> None:
    _, index = DATASETS["organ_mnist"].index(mnist)
    last = index.of("coronal")[-1]
    assert (last.id, last.array, last.row, last.part) == ("coronal/test/21", "test_images", 21, "test")
    with np.load(mnist / "organcmnist_224.npz") as arrays:
        assert arrays["test_labels"].shape == (22, 1)
        assert last.label == arrays["test_labels"][21, 0] == 0
        pixels = arrays["test_images"][21]
    dataset = ms.load_dataset("organ_mnist", root=mnist, size=24)
    assert torch.equal(dataset["coronal"].images[-1], torch.from_numpy(pixels).expand(3, 24, 24))
    assert dataset["coronal"].groups is None
    assert dataset.classes[3] == "heart"
    assert len(ms.load_dataset("organ_mnist", root=mnist, part="val", size=8)["axial"]) == 11


def test_the_largest_complete_resolution_is_used(mnist: Path) -> None:
    write_organ_mnist(mnist, 64, pixels=12)
    write_organ_mnist(mnist, 28, pixels=9)

    def used(**options: object) -> set[str]:
        return {sample.file for sample in DATASETS["organ_mnist"].index(mnist, **options)[1].samples}

    assert used() == {"organamnist_224.npz", "organcmnist_224.npz", "organsmnist_224.npz"}
    assert used(resolution=28) == {"organamnist.npz", "organcmnist.npz", "organsmnist.npz"}
    (mnist / "organcmnist_224.npz").unlink()
    assert used() == {"organamnist_64.npz", "organcmnist_64.npz", "organsmnist_64.npz"}
    with pytest.raises(DataError, match=r"should hold organamnist_224.npz.*it holds organamnist.npz"):
        used(resolution=224)
    with pytest.raises(ms.MergestreamError, match="resolution=224, 128, 64 or 28, not 96"):
        used(resolution=96)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"val_labels": None}, "Cannot read the array 'val_labels'"),
        ({"test_images": None}, "Cannot read the array 'test_images'"),
        ({"val_labels": np.zeros((10, 1), dtype=np.uint8)}, "11 images in val_images, but 10 val_labels"),
        ({"val_labels": np.zeros((11, 2), dtype=np.uint8)}, r"val_labels of .* one number per image: uint8 \(11, 2\)"),
        ({"val_labels": np.full((11, 1), 11)}, "labels from 11 to 11; 11 are known"),
        ({"val_labels": np.array([[{}]] * 11)}, "allow_pickle=False"),
    ],
)
def test_damaged_npz_files_are_refused(mnist: Path, changed: dict[str, np.ndarray | None], match: str) -> None:
    change(mnist / "organsmnist_224.npz", **changed)
    with pytest.raises(DataError, match=match):
        ms.load_dataset("organ_mnist", root=mnist)


def test_a_file_that_is_no_npz_is_refused(mnist: Path) -> None:
    (mnist / "organamnist_224.npz").write_bytes(b"half a download")
    with pytest.raises(DataError, match=r"train_images' of organamnist_224.npz .* not a zip file"):
        ms.load_dataset("organ_mnist", root=mnist)


def test_arrays_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, shape and labels of a file of gigabytes come without its images."""
    write_organ_mnist(tmp_path, pixels=64)
    root, read, opened, file = Root(tmp_path), [0], Root.open, "organamnist_224.npz"

    class Counting(io.BufferedReader):
        def read(self, size: int | None = -1) -> bytes:
            content = super().read(size)
            read[0] += len(content)
            return content

    monkeypatch.setattr(Root, "open", lambda self, path: Counting(opened(self, path).detach()))
    assert array_shape(root, file, "train_images") == (22, 64, 64)
    assert read_array(root, file, "train_labels").shape == (22, 1)
    assert 0 < read[0] < (tmp_path / file).stat().st_size / 4
    assert read_array(root, file, "train_images").shape == (22, 64, 64)
    assert read[0] > (tmp_path / file).stat().st_size / 4


def test_an_array_that_is_not_there_is_named(mnist: Path) -> None:
    for read in (array_shape, read_array):
        with pytest.raises(DataError, match=r"Cannot read the array 'more' of organamnist_224.npz"):
            read(Root(mnist), "organamnist_224.npz", "more")
        with pytest.raises(DataError, match=r"has no file nowhere.npz"):
            read(Root(mnist), "nowhere.npz", "images")
