"""MIDOG 2025 and HISTOPANTUM: odd corners, and MIDOG's real release where a copy of it lies."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

import mergestream as ms
from mergestream.data.datasets import DATASETS, image_trees, midog
from mergestream.data.datasets.index import Index
from mergestream.data.datasets.standins.drawing import picture, write_histopantum
from mergestream.data.datasets.standins.fake_tables import IMAGES, write_midog
from pictures import write_picture

REAL = Path(__file__).parents[2] / "shared" / "data" / "midog25-64.zip"
real = pytest.mark.skipif(not REAL.exists(), reason="no copy of MIDOG 2025 at ../shared/data/midog25-64.zip")
ROW = "7.png,001.tiff,1,2,{tumor},{scanner},FU Berlin,Canine,NMF,NMF,,{label}"


def index_of(name: str, root: Path, **options: str) -> Index:
    return DATASETS[name].index(root, **options)[1]


@pytest.fixture
def cells(tmp_path: Path) -> Path:
    write_midog(tmp_path)
    return tmp_path


@pytest.fixture
def tiles(tmp_path: Path) -> Path:
    write_histopantum(tmp_path)
    return tmp_path / "HISTOPANTUM"


def add_rows(root: Path, *rows: str) -> None:
    with (root / midog.TABLE).open("a", encoding="utf-8") as file:
        file.writelines(f"{row}\n" for row in rows)


def row_of(root: Path, image: str) -> str:
    return next(line for line in (root / midog.TABLE).read_text().splitlines() if line.startswith(f"{image},"))


def test_midogs_labels_domains_and_slides_are_those_of_the_rows(cells: Path) -> None:
    index = index_of("midog", cells)
    assert index.card.classes == ("NMF", "AMF")
    assert index.card.counts == midog.CARD.counts  # compare with the published counts
    for sample in index.samples:
        values = row_of(cells, sample.id).split(",")
        assert (sample.group, sample.domain, index.card.classes[sample.label]) == (values[1], values[4], values[11])
        assert sample.file == f"{IMAGES}/{sample.id}"
        assert sample.subgroups["scanner"] == values[5].replace("Hamammatsu", "Hamamatsu")
        assert [sample.subgroups[kind] for kind in ("tumor", "origin", "species")] == [values[4], *values[6:8]]
    assert Counter(s.domain for s in index.samples)["human breast cancer"] == 13
    assert len(index.samples) == 85


def test_midogs_published_flaws_are_told(cells: Path) -> None:
    index = index_of("midog", cells)
    assert [(each.what, each.why) for each in index.left_out] == [
        (
            f"{IMAGES}/85.png",
            "its rows in the CSV differ: 401.tiff at (4170, 595), NMF and 401.tiff at (3048, 595), NMF",
        ),
        (f"{IMAGES}/87.png", "no row in the CSV"),
    ]
    assert index.missing == ()
    assert index.images_found == 87


@pytest.mark.parametrize(
    ("kind", "domains"),
    [
        ("scanner", ("3D Histech", "Aperio CS2", "Hamamatsu S360", "Hamamatsu XR")),
        ("origin", ("AMC New York", "FU Berlin", "UMC Utrecht", "VMU Vienna")),
        ("species", ("Canine", "Human")),
    ],
)
def test_midogs_domain_may_be_something_else(cells: Path, kind: str, domains: tuple[str, ...]) -> None:
    index = index_of("midog", cells, domain=kind)
    assert index.card.domains == domains
    assert index.card.counts == {}  # counts are published by tumour
    assert all(sample.domain == sample.subgroups[kind] for sample in index.samples)
    by_tumour = index_of("midog", cells)
    assert [(s.id, s.label, s.group) for s in index.samples] == [(s.id, s.label, s.group) for s in by_tumour.samples]
    dataset = ms.load_dataset("midog", root=cells, size=16, domain=kind)
    assert sum(len(dataset[domain]) for domain in dataset) == len(by_tumour.samples)


def test_midogs_unknown_kind_of_domain_is_refused(cells: Path) -> None:
    with pytest.raises(ms.MergestreamError, match="Did you mean 'scanner'"):
        ms.load_dataset("midog", root=cells, domain="scaner")


def test_midogs_repeated_row_counts_once_also_with_other_votes(cells: Path) -> None:
    whole = index_of("midog", cells)
    votes = ",NMF,NMF,,NMF"
    row = row_of(cells, "1.png")
    assert row.endswith(votes)
    add_rows(cells, row, row.replace(votes, ",AMF,NMF,NMF,NMF"))
    assert index_of("midog", cells) == whole


def test_midogs_image_with_two_labels_is_left_out(cells: Path) -> None:
    add_rows(cells, row_of(cells, "1.png").replace(",NMF,NMF,,NMF", ",AMF,AMF,,AMF"))
    index = index_of("midog", cells)
    why = next(each.why for each in index.left_out if each.what.endswith("/1.png"))
    assert why == "its rows in the CSV differ: 001.tiff at (40, 7), NMF and 001.tiff at (40, 7), AMF"
    assert len(index.samples) == 84


def test_midogs_row_without_an_image_is_missing(cells: Path) -> None:
    for name in ("1.png", "85.png", "87.png"):  # those with two cells or none are not wanted anyway
        (cells / IMAGES / name).unlink()
    index = index_of("midog", cells)
    assert index.missing == ("1.png",)
    assert index.left_out == ()
    with pytest.raises(ms.MergestreamError, match=r"'1\.png: is missing'.*--skip-bad 1"):
        ms.load_dataset("midog", root=cells)


def test_midogs_images_are_matched_by_their_number(cells: Path) -> None:
    before = index_of("midog", cells)
    write_picture(cells / "1.webp", picture("x", 0, 0))
    with pytest.raises(ms.MergestreamError, match="Two images have the id '1'"):
        index_of("midog", cells)
    (cells / IMAGES / "1.png").unlink()
    after = index_of("midog", cells)
    assert after.samples[0].file == "1.webp"
    assert [s.id for s in after.samples] == [s.id for s in before.samples]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW.format(tumor="canine lymphoma", scanner="3D Histech", label="nmf"), "majority 'nmf', none of"),
        (ROW.format(tumor="feline lymphoma", scanner="3D Histech", label="NMF"), "Tumor 'feline lymphoma', none of"),
        (ROW.format(tumor="canine lymphoma", scanner="", label="NMF"), "empty Scanner"),
        ("7.png,001.tiff", "2 fields for 12 columns"),
    ],
)
def test_midogs_bad_row_is_refused_with_its_line(cells: Path, row: str, message: str) -> None:
    line = len((cells / midog.TABLE).read_text().splitlines()) + 1
    add_rows(cells, row)
    with pytest.raises(ms.MergestreamError, match=message) as refusal:
        index_of("midog", cells)
    if "columns" not in message:
        assert f"Line {line} of {midog.TABLE}" in str(refusal.value)


def test_midogs_table_without_a_column_is_refused(cells: Path) -> None:
    table = cells / midog.TABLE
    table.write_text(table.read_text().replace("majority", "label", 1))
    with pytest.raises(ms.MergestreamError, match="lacks the column majority"):
        index_of("midog", cells)


def test_midog_without_a_whole_tumour_is_refused(cells: Path) -> None:
    table = cells / midog.TABLE
    table.write_text("\n".join(line for line in table.read_text().splitlines() if "melanoma" not in line))
    with pytest.raises(ms.MergestreamError, match="no image in the domain 'human melanoma'"):
        ms.load_dataset("midog", root=cells)


@real
def test_the_real_midog_has_the_published_counts() -> None:
    index = index_of("midog", REAL)
    assert len(index.samples) == sum(midog.CARD.counts.values()) == 11_935
    assert index.images_found == 11_936
    assert index.missing == ()
    assert [(each.what, each.why) for each in index.left_out] == [
        (
            "MIDOG25/8925.webp",
            "its rows in the CSV differ: 085.tiff at (4170, 488), NMF and 085.tiff at (3048, 4569), NMF",
        )
    ]
    counts = index.counts()
    assert {domain: sum(by_class.values()) for domain, by_class in counts.items()} == dict(midog.CARD.counts)
    assert {domain: by_class["AMF"] for domain, by_class in counts.items()} == {
        "canine lymphoma": 317,
        "canine cutaneous mast cell tumor": 351,
        "human breast cancer": 404,
        "canine soft tissue sarcoma": 210,
        "human melanoma": 271,
        "canine lung cancer": 110,
        "human neuroendocrine tumor": 85,
    }
    # 10,189 normal cells less the two of 8925.png.
    assert Counter(index.card.classes[sample.label] for sample in index.samples) == {"NMF": 10_187, "AMF": 1_748}
    assert len({sample.group for sample in index.samples}) == 475


@real
def test_the_real_midogs_scanners_are_four() -> None:
    index = index_of("midog", REAL, domain="scanner")
    assert {domain: sum(by_class.values()) for domain, by_class in index.counts().items()} == {
        "3D Histech": 6100,
        "Aperio CS2": 3015,
        "Hamamatsu S360": 580,  # 582 less the two of 8925.png
        "Hamamatsu XR": 1789 + 451,
    }
    assert {s.subgroups["scanner"] for s in index.samples} == set(index.card.domains)


@real
def test_the_real_midog_decodes() -> None:
    data = ms.load_dataset("midog", root=REAL, size=32)["human neuroendocrine tumor"]
    assert data.images.shape == (639, 3, 32, 32)
    assert data.class_counts() == {"NMF": 554, "AMF": 85}
    assert len(set(data.groups)) < len(data)
    assert float(data.images.float().std()) > 10  # stained tissue, not blank


def test_histopantums_spellings_of_classes_are_one(tiles: Path) -> None:
    index = index_of("histopantum", tiles)
    assert index.counts() == {domain: {"non_tumor": 4, "tumor": 4} for domain in index.card.domains}
    for sample in index.samples:
        assert sample.label == (not Path(sample.file).parent.name.startswith("non"))
    assert len({Path(sample.file).parent.name for sample in index.samples}) == 7
    assert index.left_out == ()


def test_histopantums_groups_are_cases_over_both_classes(tiles: Path) -> None:
    index = index_of("histopantum", tiles)
    of_colon = {sample.group for sample in index.of("colon")}
    assert of_colon == {"TCGA-CO-AA0B", "TCGA-CO-AA1B"}
    for case in of_colon:
        assert Counter(s.label for s in index.samples if s.group == case) == {0: 2, 1: 2}
    assert len({sample.group for sample in index.samples}) == 8  # no case is in two domains


@pytest.mark.parametrize(
    ("stem", "case"),
    [
        ("TCGA-3L-AA1B-01Z-00-DX1_10240_15360", "TCGA-3L-AA1B"),
        ("tcga-3l-aa1b-01z-00-dx1_1_2", "TCGA-3L-AA1B"),
        ("TCGA-3L-AA1B", "TCGA-3L-AA1B"),
        ("TCGA-3L-AA1B_10240_15360", "TCGA-3L-AA1B"),
        ("TCGA-3L-AA1BX-01Z", None),
        ("TCGA-3L-AA1", None),
        ("img001", None),
        ("x_TCGA-3L-AA1B", None),
    ],
)
def test_a_case_is_read_from_the_name(stem: str, case: str | None) -> None:
    assert image_trees.case_of(stem) == case


def test_a_tile_without_a_case_is_a_group_of_its_own(tiles: Path) -> None:
    for number in (1, 2):
        write_picture(tiles / "uterus" / "tumor" / f"img{number:03d}.png", picture("uterus", 1, 50 + number))
    data = ms.load_dataset("histopantum", root=tiles, size=16)["uterus"]
    assert len(data) == 10
    assert sorted(Counter(data.groups).values()) == [1, 1, 4, 4]


def test_a_tile_under_two_spellings_of_one_class_is_refused(tiles: Path) -> None:
    folder = tiles / "colon"
    tile = next((folder / "tumour").iterdir())
    (folder / "tumor").mkdir()
    shutil.copy(tile, folder / "tumor" / tile.name)
    with pytest.raises(ms.MergestreamError, match=rf"have one id: 'colon/tumor/{tile.name}'"):
        index_of("histopantum", tiles)
    (folder / "tumour" / tile.name).unlink()
    assert index_of("histopantum", tiles).counts()["colon"] == {"non_tumor": 4, "tumor": 4}


def test_a_folder_of_another_class_is_told(tiles: Path) -> None:
    write_picture(tiles / "colon" / "stroma" / "1.jpg", picture("colon", 0, 9))
    index = index_of("histopantum", tiles)
    assert [(each.what, each.why) for each in index.left_out] == [
        ("colon/stroma/1.jpg", "'stroma' is not a class of 'histopantum'")
    ]


@pytest.mark.parametrize("inside", ["colon/", ""])
def test_histopantum_may_be_a_zip_per_cancer(tiles: Path, tmp_path: Path, inside: str) -> None:
    folder = tmp_path / "zips"
    for domain in image_trees.HISTOPANTUM.domains:
        base = (tiles, domain) if inside else (tiles / domain, None)
        shutil.make_archive(str(folder / domain), "zip", *base)
    zipped, whole = index_of("histopantum", folder), index_of("histopantum", tiles)
    assert zipped.samples[0].file.startswith(f"colon/{inside}non-tumour/")
    assert [(s.id, s.label, s.group) for s in zipped.samples] == [(s.id, s.label, s.group) for s in whole.samples]
    assert zipped.left_out == ()


def test_histopantum_without_a_cancer_is_refused(tiles: Path) -> None:
    shutil.rmtree(tiles / "ovarian")
    with pytest.raises(ms.MergestreamError, match="lacks ovarian"):
        index_of("histopantum", tiles)


def test_nothing_second_hand_is_compared() -> None:
    assert image_trees.HISTOPANTUM.counts == {}
    assert image_trees.HISTOPANTUM.total is None
