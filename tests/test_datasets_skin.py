"""ISIC by artefact and the four sets outside: the rule, the published sizes, and every layout they come in."""

import csv
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mergestream as ms
from mergestream.data.datasets import DATASETS, isic
from mergestream.data.datasets.dataset_sources import verify
from mergestream.data.datasets.index import Index
from mergestream.data.datasets.outside_skin import SkinTable, label_of
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.standins.drawing import picture
from mergestream.data.datasets.standins.fake_organs import FakeImage, write_medimeta
from mergestream.data.datasets.table_files import read_csv
from pictures import write_picture

COLUMNS = ["", "image", "dark_corner", "hair", "gel_border", "gel_bubble", "ruler", "ink", "patches", "vasc"]
MELANOMAS = {"dark_corner": 604, "hair": 617, "gel_bubble": 429, "ruler": 163, "clean": 411}
TRAIN, VAL = isic.CARD.part_counts["train"], isic.CARD.part_counts["val"]
OUTSIDE = {"derm7pt_derm": 872, "derm7pt_clinic": 839, "ph2": 200, "pad_ufes": 531}
FOUR = ("dark_corner", "hair", "gel_bubble", "ruler")


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("isic")
    DATASETS["isic"].write_standin(folder)
    return folder


@pytest.fixture
def root(standin: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    shutil.copytree(standin, tmp_path / "root")
    return tmp_path / "root"


def index(root: Path, **options: str) -> Index:
    return DATASETS["isic"].index(root, **options)[1]


def labels(contents: Index, domain: str) -> dict[str, int]:
    return {sample.id: sample.label for sample in contents.of(domain)}


def numpy_rule(scores: np.ndarray) -> np.ndarray:
    """The rule for scores [N,4], written a second time."""
    names = np.array([*FOUR, "clean"])
    return names[np.where(scores.max(axis=1) > 0.65, scores.argmax(axis=1), 4)]


def scores_of(domain: str, random: np.random.RandomState, number: int) -> dict[str, float]:
    """Scores that mean a domain, at the threshold and in ties too; four other columns shout and must not be heard."""
    loud = dict(zip(("gel_border", "ink", "patches", "vasc"), random.uniform(0.9, 1, size=4), strict=True))
    if domain == "clean":
        four = random.uniform(0, 0.65, size=4)
        four[number % 4] = (0.65, 0.6499999, four[number % 4])[number % 3]
        return {**dict(zip(FOUR, four, strict=True)), **loud}
    top = (0.6500001, 0.99999, random.uniform(0.66, 1))[number % 3]
    four = random.uniform(0, top, size=4).clip(max=top - 1e-9)
    four[FOUR.index(domain) :] = np.where(number % 5 == 0, top, four[FOUR.index(domain) :])  # equals of later artefacts
    four[FOUR.index(domain)] = top
    return {**dict(zip(FOUR, four, strict=True)), **loud}


def write_table(path: Path, sizes: dict[str, int], melanomas: dict[str, int], seed: int) -> None:
    random = np.random.RandomState(seed)
    rows = [(domain, n < melanomas[domain], n) for domain, size in sizes.items() for n in range(size)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, "label", "label_string"])
        for number, place in enumerate(random.permutation(len(rows))):
            domain, melanoma, n = rows[place]
            scores = scores_of(domain, random, n)
            cells = [number, f"ISIC_{seed}{number:06d}", *(repr(float(scores[name])) for name in COLUMNS[2:])]
            writer.writerow([*cells, int(melanoma), "malignant" if melanoma else "benign"])


def test_the_rule_gives_back_the_published_groups(tmp_path: Path) -> None:
    """12,343 rows of train and 2,057 of val in the published form, each built for its group."""
    assert sum(TRAIN.values()) == 12_343
    assert sum(VAL.values()) == 2_057
    assert sum(MELANOMAS.values()) == 2_224
    val_melanomas = dict(zip(VAL, (90, 110, 80, 24, 90), strict=True))  # 394 in all; by group not published
    for part, sizes, melanomas in (("train", TRAIN, MELANOMAS), ("val", VAL, val_melanomas)):
        write_table(tmp_path / f"{part}_bias_0_1.csv", sizes, melanomas, seed=1 + (part == "val"))
        opened = Root(tmp_path)
        table = SkinTable("t.csv", read_csv(opened, f"{part}_bias_0_1.csv"))
        rows = isic.scored(table, part)
        assert Counter(row.domain for row in rows) == sizes == isic.CARD.part_counts[part]
        assert Counter(row.domain for row in rows if row.label == 1) == melanomas
        four = np.array([[float(row[name]) for name in FOUR] for row in table.rows])
        assert (four.max(axis=1) == 0.65).sum() > 100
        assert (np.sort(four)[:, -1] == np.sort(four)[:, -2]).sum() > 100
        assert [row.domain for row in rows] == numpy_rule(four).tolist()
    assert sum(isic.CARD.counts[domain] for domain in isic.CARD.domains) == 14_400


@pytest.mark.parametrize(
    ("four", "domain"),
    [
        ((0.65, 0.65, 0.65, 0.65), "clean"),
        ((0.65, 0.65, 0.65, 0.6500001), "ruler"),
        ((0.1, 0.9, 0.9, 0.9), "hair"),
        ((0.9, 0.2, 0.9, 0.1), "dark_corner"),
        ((0.0, 0.0, 0.0, 0.0), "clean"),
        ((0.66, 0.7, 0.98, 0.97), "gel_bubble"),
    ],
)
def test_the_rule_at_its_edges(four: tuple[float, ...], domain: str) -> None:
    scores = {**dict(zip(FOUR, four, strict=True)), "gel_border": 1.0, "ink": 1.0, "patches": 1.0, "vasc": 1.0}
    assert isic.artefact_domain(scores) == domain == numpy_rule(np.array([four]))[0]


def test_train_and_val_are_the_default_and_outside_sets_belong_to_every_part(standin: Path) -> None:
    sizes = {}
    for part in (None, "train", "val", "test", "all"):
        contents = index(standin, **({"part": part} if part else {}))
        sizes[part] = sum(sample.domain in isic.CARD.domains for sample in contents.samples)
        assert contents.card.outside == isic.CARD.outside
        assert len(contents.of("ph2")) == 6
    assert sizes == {None: 60, "train": 40, "val": 20, "test": 20, "all": 80}
    assert index(standin).card.counts == isic.CARD.counts
    assert index(standin, part="train").card.counts == {**TRAIN, **OUTSIDE}
    assert index(standin, part="all").card.counts == OUTSIDE  # the test part's sizes by domain are not published
    checked = verify(DATASETS["isic"], standin)
    assert checked.differing["hair"] == (12, 5745)
    assert checked.differing["ph2"] == (6, 200)
    with pytest.raises(ms.MergestreamError, match="no part of 'isic' called 'training'"):
        index(standin, part="training")


def test_one_table_without_splits_is_used_whole(root: Path) -> None:
    for part in ("train", "val", "test"):
        (root / "data_proc" / f"{part}_bias_0_1.csv").unlink()
    contents = index(root)
    assert sum(sample.domain in isic.CARD.domains for sample in contents.samples) == 80
    assert {sample.part for sample in contents.samples} == {None}
    assert contents.card.counts == OUTSIDE
    with pytest.raises(
        ms.MergestreamError, match=r"no image of the part 'val'.*train_bias_0_1\.csv, val_bias_0_1\.csv"
    ):
        index(root, part="val")


def test_another_trap_set(root: Path) -> None:
    shutil.copytree(root / "data_proc", root / "trap_sets")  # the same tables twice do no harm
    for part, other in (("train", "test"), ("val", "val"), ("test", "train")):
        (root / "trap_sets" / f"{part}_bias_0_1.csv").rename(root / "trap_sets" / f"{other}_bias_0.5_3.csv")
    contents = index(root, bias="0.5_3", part="train")
    assert {sample.id for sample in contents.of("hair")} == {s.id for s in index(root, part="test").of("hair")}
    assert contents.card.counts == OUTSIDE  # published sizes are those of bias 0_1
    with pytest.raises(ms.MergestreamError, match=r"no train_bias_0\.9_1\.csv"):
        index(root, bias="0.9_1")
    text = (root / "data_proc" / "train_bias_0_1.csv").read_text()
    (root / "train_bias_0_1.csv").write_text(text.replace("ISIC_0000000", "ISIC_0000999"))
    with pytest.raises(ms.MergestreamError, match="two different train_bias_0_1"):
        index(root)


def test_lesions_are_groups_and_what_no_table_names_is_left_out(standin: Path) -> None:
    contents = index(standin)
    groups = {sample.id: sample.group for sample in contents.samples}
    assert groups["ISIC_0000000"] == groups["ISIC_0000001"] == "HAM_0000000"
    assert groups["ISIC_0000003"] is None  # an empty lesion_id is a lesion of its own
    data = ms.load_dataset("isic", root=standin, size=16)["dark_corner"]
    assert data.groups[:4] == ["HAM_0000000", "HAM_0000000", "HAM_0000002", "id:ISIC_0000003"]
    left = {Path(each.what).stem: each.why for each in contents.left_out}
    assert "none of the artefact tables" in left["ISIC_0900001"]
    assert "none of the artefact tables" in left["ISIC_0000000_downsampled"]
    assert next(s for s in contents.samples if s.id == "ISIC_0000000").file.endswith("/ISIC_0000000.jpg")


def test_a_downsampled_name_stands_for_itself_only(root: Path) -> None:
    home = root / "ISIC_2019_Training_Input" / "ISIC_2019_Training_Input"
    (home / "ISIC_0000000.jpg").unlink()
    contents = index(root)
    assert contents.missing == ("ISIC_0000000.jpg",)
    with pytest.raises(ms.MergestreamError, match=r"1 images of 'isic' .*ISIC_0000000\.jpg: is missing"):
        ms.load_dataset("isic", root=root, size=16)
    table = root / "data_proc" / "train_bias_0_1.csv"
    table.write_text(table.read_text().replace("ISIC_0000000,", "ISIC_0000000_downsampled,"))
    assert "ISIC_0000000_downsampled" in labels(index(root), "dark_corner")
    assert not index(root).missing


def test_a_missing_image_of_another_part_does_not_matter(root: Path) -> None:
    (root / "ISIC_2019_Training_Input" / "ISIC_2019_Training_Input" / "ISIC_0000079.jpg").unlink()
    assert not index(root).missing
    assert index(root, part="test").missing == index(root, part="all").missing == ("ISIC_0000079.jpg",)


def test_labels_that_the_ground_truth_denies_are_left_out(root: Path) -> None:
    table = root / "ISIC_2019_Training_GroundTruth.csv"
    text = table.read_text().replace("ISIC_0000000,0.0,1.0", "ISIC_0000000,1.0,0.0")
    table.write_text(text.replace("ISIC_0000004,1.0,0.0", "ISIC_0000004,0.0,1.0"))
    contents = index(root)
    denied = {Path(each.what).stem: each.why for each in contents.left_out if "ground truth" in each.why}
    assert set(denied) == {"ISIC_0000000", "ISIC_0000004"}
    assert denied["ISIC_0000000"].startswith("benign by")
    assert len(contents.of("dark_corner")) == 10
    # Two denied, a carcinoma, a downsampled one, two of Derm7pt and six of PAD-UFES beside 58 + 8 + 8 + 6 + 6 samples.
    assert contents.images_found == 12 + 86


def test_a_table_with_nonsense_is_refused(root: Path) -> None:
    table = root / "data_proc" / "train_bias_0_1.csv"
    good = table.read_text()
    for old, new, words in (
        ("0.7000", "high", "not a number"),
        ("0.7000", "nan", "not finite"),
        (",0,benign", ",2,benign", "neither 0"),
    ):
        table.write_text(good.replace(old, new, 1))
        with pytest.raises(ms.MergestreamError, match=words):
            index(root)


def epvt_folders(root: Path, standin: Path) -> None:
    for part in ("train", "val"):
        for sample in DATASETS["isic"].index(standin, part=part)[1].samples:
            if sample.domain in isic.CARD.domains:
                target = root / f"ISIC2019_{part}" / sample.domain / ("ben", "mel")[sample.label] / f"{sample.id}.jpg"
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(standin / sample.file, target)


def test_epvt_s_folders_hold_the_same_samples_as_the_tables(standin: Path, tmp_path: Path) -> None:
    epvt_folders(tmp_path, standin)
    in_folders, in_tables = index(tmp_path), index(standin)
    assert in_folders.card.outside == ()
    for domain in isic.CARD.domains:
        assert labels(in_folders, domain) == labels(in_tables, domain)
    assert {s.id: s.part for s in in_folders.samples} == {
        s.id: s.part for s in in_tables.samples if s.domain in isic.CARD.domains
    }
    alone = index(tmp_path / "ISIC2019_train")
    assert len(alone.samples) == 40
    assert {sample.part for sample in alone.samples} == {None}
    with pytest.raises(ms.MergestreamError, match="no image of the part 'test'"):
        index(tmp_path, part="test")


def test_derm7pt_by_the_published_lists(root: Path) -> None:
    contents = index(root)
    assert labels(contents, "derm7pt_derm") == {
        **{f"derm7pt_derm/nel{n:03d}": 0 for n in (28, 30, 32, 34)},
        **{f"derm7pt_derm/nel{n:03d}": 1 for n in (36, 38, 40, 42)},
    }
    assert contents.of("derm7pt_clinic")[0].file.endswith("images/NEL/NEL027.JPG")
    assert contents.of("derm7pt_clinic")[0].group == contents.of("derm7pt_derm")[0].group == "2"
    assert any("atlas-dermato-all.csv" in each.why and "Nel026" in each.what for each in contents.left_out)
    # The list decides, not the diagnosis.
    table = root / "datasets" / "edraAtlas" / "atlas-dermato-all.csv"
    table.write_text(table.read_text().replace("1E2,,,0", "1E2,,,1") + "edraAtlas,,xyz001" + ",a" * 13 + ",0\n")
    contents = index(root)
    assert labels(contents, "derm7pt_derm")["derm7pt_derm/nel028"] == 1
    assert contents.missing == ("xyz001 (of datasets/edraAtlas/atlas-dermato-all.csv)",)


def test_derm7pt_without_the_lists(root: Path) -> None:
    shutil.rmtree(root / "datasets")
    table = root / "release_v0" / "meta" / "meta.csv"
    table.write_text(table.read_text() + "10,lentigo" + ",x" * 13 + ",NEL/NEL099.JPG,NEL/Nel028.jpg,,\n")
    contents = index(root)
    assert Counter(sample.label for sample in contents.of("derm7pt_derm")) == {0: 4, 1: 4}
    assert any(each.why == "basal cell carcinoma" and "Nel026" in each.what for each in contents.left_out)
    assert any(each.what.startswith("case 10") for each in contents.left_out)  # an image that two cases show
    assert contents.missing == ("release_v0/images/NEL/NEL099.JPG (of release_v0/meta/meta.csv)",)
    assert "derm7pt_derm" not in contents.card.counts
    assert [label_of(name) for name in ("melanosis", "Melanoma metastasis", "Basal cell carcinoma")] == [0, 1, None]


def test_derm7pt_of_medimeta(root: Path) -> None:
    shutil.rmtree(root / "release_v0")
    shutil.rmtree(root / "datasets")
    names = ("basal cell carcinoma", "clark nevus", "melanoma", "melanosis")
    for folder in ("derm7pt_derm", "skinl_photo"):
        rows = [FakeImage(picture(folder, n % 4, n), n % 4, "train", {"case_id": f"c{n // 2}"}) for n in range(8)]
        write_medimeta(root / folder, "Diagnosis", names, rows)
    contents = index(root)
    assert contents.card.outside == isic.CARD.outside
    for kind in ("derm", "clinic"):
        numbers = {f"derm7pt_{kind}/{n:06d}": int(n % 4 == 2) for n in (1, 2, 3, 5, 6, 7)}
        assert labels(contents, f"derm7pt_{kind}") == numbers
    assert contents.of("derm7pt_derm")[1].group == "c1"
    assert Counter(each.why for each in contents.left_out)["basal cell carcinoma"] == 4
    data = ms.load_dataset("isic", root=root, size=24)["derm7pt_clinic"]
    np.testing.assert_array_equal(data.images[0].permute(1, 2, 0).numpy(), picture("skinl_photo", 1, 1))


PH2 = {f"ph2/IMD{3 + 7 * n:03d}": int(n % 3 == 2) for n in range(6)}


def test_ph2_by_its_table(root: Path) -> None:
    write_picture(root / "PH2Dataset" / "masks" / "IMD003.bmp", picture("mask", 0, 0))  # some mirrors gather the masks
    contents = index(root)
    assert labels(contents, "ph2") == PH2
    assert all("_Dermoscopic_Image/" in sample.file for sample in contents.of("ph2"))
    assert len(set(ms.load_dataset("isic", root=root, size=24)["ph2"].ids)) == 6


def test_ph2_tables_with_nonsense_are_refused(root: Path) -> None:
    table = root / "PH2Dataset" / "PH2_dataset.txt"
    good = table.read_text()
    table.write_text(good.replace("  2 ||", "  7 ||"))
    with pytest.raises(ms.MergestreamError, match="clinical diagnosis '7'"):
        index(root)
    table.write_text("nothing")
    with pytest.raises(ms.MergestreamError, match="has no row"):
        index(root)


def test_pad_ufes_keeps_what_is_no_carcinoma(root: Path) -> None:
    contents = index(root)
    labels_by_number = {sample.id.rpartition("_")[2]: sample.label for sample in contents.of("pad_ufes")}
    assert labels_by_number == {"300": 0, "301": 0, "302": 1, "306": 0, "307": 0, "308": 1}
    groups = {sample.id.rpartition("_")[2]: sample.group for sample in contents.of("pad_ufes")}
    assert groups["300"] == groups["301"] == "PAT_1500" != groups["302"]
    assert len([each for each in contents.left_out if "carcinoma, which EPVT" in each.why]) == 4
    assert any("imgs_part_3/imgs_part_3" in sample.file for sample in contents.of("pad_ufes"))  # still zipped
    table = root / "PAD-UFES-20" / "metadata.csv"
    table.write_text(table.read_text().replace(",NEV,", ",XYZ,", 1))
    with pytest.raises(ms.MergestreamError, match="diagnosis 'XYZ'"):
        index(root)


def test_a_root_of_outside_sets_alone_loads(root: Path) -> None:
    for name in ("ISIC_2019_Training_Input", "release_v0", "datasets"):
        shutil.rmtree(root / name)
    dataset = ms.load_dataset("isic", root=root, size=16)
    assert dataset.domains == ()
    assert dataset.outside == ("ph2", "pad_ufes")
    assert dataset["ph2"].class_counts() == {"benign": 4, "melanoma": 2}
    # The tables are there, as in a clone of the artefact repository, but not their images: said, not passed over.
    assert {each.what for each in dataset.left_out} >= {f"data_proc/{part}_bias_0_1.csv" for part in ("train", "val")}
    assert index(root).card.counts == {"ph2": 200, "pad_ufes": 531}
    with pytest.raises(ms.MergestreamError, match="no image of the part 'train'"):
        index(root, part="train")


def test_lists_without_images_are_no_set(root: Path) -> None:
    shutil.rmtree(root / "release_v0")
    (root / "datasets" / "ph2images").mkdir()
    contents = index(root)
    assert contents.card.outside == ("ph2", "pad_ufes")
    assert not contents.missing


def test_tables_without_any_image_are_refused(root: Path) -> None:
    for name in ("ISIC_2019_Training_Input", "release_v0", "datasets", "PH2Dataset", "PAD-UFES-20"):
        shutil.rmtree(root / name)
    with pytest.raises(ms.MergestreamError, match="name 80 images, none of which is there"):
        index(root)


def test_two_images_of_one_id_are_refused(root: Path) -> None:
    write_picture(root / "copy" / "ISIC_0000001.png", picture("copy", 0, 0))
    with pytest.raises(ms.MergestreamError, match=r"Two images have the id 'isic_0000001'"):
        index(root)


def test_pixels_are_those_of_the_files(standin: Path) -> None:
    sample = index(standin).of("pad_ufes")[0]
    pixels = ms.load_dataset("isic", root=standin, size=24)["pad_ufes"].images[0].permute(1, 2, 0).numpy()
    with Image.open(standin / sample.file) as image:
        np.testing.assert_array_equal(pixels, np.asarray(image.convert("RGB")))
