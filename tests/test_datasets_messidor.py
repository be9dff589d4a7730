"""Messidor: errata, encodings, layouts, and the spreadsheets that its grades come in."""

import csv
import io
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import openpyxl
import pytest
import xlrd

import mergestream as ms
from mergestream.data.datasets import DATASETS, messidor
from mergestream.data.datasets.index import Index
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.standins.drawing import picture
from mergestream.data.datasets.standins.fake_tables import COPY, ERRATUM, ORIGINAL, xls
from mergestream.data.datasets.table_files import read_sheet


def xlsx(rows: list[list[str]]) -> bytes:
    """A spreadsheet of one sheet of text."""
    book, buffer = openpyxl.Workbook(), io.BytesIO()
    for row in rows:
        book.active.append(row)
    book.save(buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messidor")
    DATASETS["messidor"].write_standin(folder)
    return folder


@pytest.fixture
def root(standin: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    shutil.copytree(standin, tmp_path / "root")
    return tmp_path / "root"


def index(root: Path, **options: bool) -> Index:
    return DATASETS["messidor"].index(root, **options)[1]


def samples(contents: Index) -> set[tuple[str, str, int]]:
    return {(sample.id, sample.domain, sample.label) for sample in contents.samples}


def test_every_department_and_grade_is_there(standin: Path) -> None:
    contents = index(standin)
    assert contents.counts() == {
        "Lariboisière": {"grade 0": 6, "grade 1": 6, "grade 2": 6, "grade 3": 7},
        "St Etienne": {"grade 0": 6, "grade 1": 6, "grade 2": 6, "grade 3": 6},
        "Brest": {"grade 0": 6, "grade 1": 6, "grade 2": 6, "grade 3": 7},
    }
    assert not contents.missing
    assert Path(contents.of("Brest")[0].file).parts[0] == "Base33"  # from a zip


def test_errata_are_applied_and_told(standin: Path) -> None:
    contents = index(standin)
    grades = {sample.id: sample.label for sample in contents.samples}
    assert grades[f"Base11/{ERRATUM[0]}"] == 3 != ERRATUM[1]
    assert f"Base33/{COPY}" not in grades
    assert grades[f"Base33/{ORIGINAL}"] == 3
    reasons = {each.what: each.why for each in contents.left_out}
    assert reasons == {
        f"grade 1 of Base11/{ERRATUM[0]}": "is 3 (publisher's erratum)",
        f"Base33/{COPY}.tif": f"a copy of {ORIGINAL} (publisher's erratum)",
    }
    assert contents.images_found == 75  # the copy lies there, a corrected grade is no image
    as_published = index(standin, errata=False)
    grades = {sample.id: sample.label for sample in as_published.samples}
    assert (grades[f"Base11/{ERRATUM[0]}"], grades[f"Base33/{COPY}"]) == (1, 2)
    assert not as_published.left_out


def test_the_errata_leave_1187_of_1200() -> None:
    copies = {
        name.removeprefix("Base33/"): original
        for name, original in messidor.CARD.errata.items()
        if isinstance(original, str)
    }
    assert len(copies) == 13
    assert not set(copies) & set(copies.values())
    assert all(messidor.acquired(stem) for pair in copies.items() for stem in pair)
    assert {name: grade for name, grade in messidor.CARD.errata.items() if isinstance(grade, int)} == {
        "Base11/20051020_63045_0100_PP": 0,
        "Base11/20051020_63936_0100_PP": 1,
        "Base11/20051020_64007_0100_PP": 3,
        "Base13/20060523_48477_0100_PP": 3,
    }
    assert "1,187" in messidor.CARD.notes


def test_a_name_of_another_base_is_no_erratum(root: Path) -> None:
    """The publisher's errata name the Base as well."""
    table = xls([("Image name", "Ophthalmologic department", "Retinopathy grade"), (f"{COPY}.tif", "Brest", 1)])
    (root / "Base34" / "Annotation_Base34.xls").write_bytes(table)
    for path in (root / "Base34").glob("*.tif"):
        path.unlink()
    with zipfile.ZipFile(root / "Base33.zip") as archive:
        (root / "Base34" / f"{COPY}.tif").write_bytes(archive.read(f"{COPY}.tif"))
    assert (f"Base34/{COPY}", "Brest", 1) in samples(index(root))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Service Ophtalmologie Lariboisière", "Lariboisière"),
        ("Service Ophtalmologie LariboisiÃ¨re", "Lariboisière"),
        ("Service Ophtalmologie Lariboisi\ufffdre", "Lariboisière"),
        ("Service Ophtalmologie Lariboisie\u0300re", "Lariboisière"),
        ("service ophtalmologie lariboisiere ", "Lariboisière"),
        ("CHU de St Etienne", "St Etienne"),
        ("CHU de St-\u00c9tienne", "St Etienne"),
        ("LaTIM - CHU de BREST", "Brest"),
    ],
)
def test_departments_survive_their_encodings(text: str, name: str) -> None:
    assert messidor.department(text) == name


def test_an_unknown_department_or_grade_is_refused(root: Path) -> None:
    home = root / "Base11" / "Annotation_Base11.xls"
    head = ("Image name", "Ophthalmologic department", "Retinopathy grade")
    name = next(path.name for path in (root / "Base11").glob("*.tif"))
    for row, words in (
        ((name, "Hôpital de Lyon", 1), "Hôpital de Lyon"),
        ((name, "Brest", 4), "retinopathy grade '4'"),
    ):
        home.write_bytes(xls([head, row]))
        with pytest.raises(ms.MergestreamError, match=words):
            index(root)
    home.write_bytes(xls([("Image", "Grade")]))
    with pytest.raises(
        ms.MergestreamError, match=r"Annotation_Base11.xls .* lacks one of the columns .*\['Image', 'Grade'\]"
    ):
        index(root)


def test_tables_may_be_converted(root: Path, standin: Path) -> None:
    """.csv with semicolons and .xlsx hold the same as .xls."""
    for base, ending in (("Base11", "csv"), ("Base21", "xlsx")):
        old = root / base / f"Annotation_{base}.xls"
        sheet = xlrd.open_workbook(old).sheet_by_name("Feuil1")
        rows = [[str(value) for value in sheet.row_values(number)] for number in range(sheet.nrows)]
        for row in rows[1:]:
            row[2] = str(int(float(row[2])))
            row[0] = row[0].removesuffix(".tif")  # names with or without their ending
        old.unlink()
        new = old.with_suffix(f".{ending}")
        if ending == "csv":
            with new.open("w", newline="", encoding="cp1252") as file:
                csv.writer(file, delimiter=";").writerows(rows)
        else:
            new.with_name("Annotation Base21.xlsx").write_bytes(xlsx(rows))
    assert samples(index(root)) == samples(index(standin))
    (root / "Annotation_Base11.csv").write_text("again")
    with pytest.raises(ms.MergestreamError, match="two annotations of Base11"):
        index(root)


def test_images_may_lie_flat(standin: Path, tmp_path: Path) -> None:
    for path in standin.rglob("*.*"):
        if path.suffix == ".zip":
            zipfile.ZipFile(path).extractall(tmp_path)
        elif path.is_file():
            shutil.copy(path, tmp_path / path.name)
    contents = index(tmp_path)
    assert samples(contents) == samples(index(standin))
    assert all("/" not in sample.file for sample in contents.samples)


def test_images_come_from_their_own_base(root: Path) -> None:
    """An image of the same name in another Base is neither taken nor in the way."""
    victim = index(root).of("St Etienne")[0]
    (root / "Base34" / Path(victim.file).name).write_bytes((root / victim.file).read_bytes())
    contents = index(root)
    assert next(sample for sample in contents.samples if sample.id == victim.id).file == victim.file
    assert [(each.what, each.why) for each in contents.left_out if "no annotation" in each.why] == [
        (f"Base34/{Path(victim.file).name}", "no annotation names it")
    ]
    (root / victim.file).unlink()
    assert index(root).missing == (victim.file,)
    (root / "Base21" / "more").mkdir()
    for folder in ("Base21", "Base21/more"):
        shutil.copy(root / "Base34" / Path(victim.file).name, root / folder)
    with pytest.raises(ms.MergestreamError, match="twice"):
        index(root)


def test_acquisition_is_the_time_in_the_name(standin: Path) -> None:
    assert messidor.acquired("20051019_38557_0100_PP") == "20051019-038557"
    assert messidor.acquired("20051019_9557_0100_PP") < messidor.acquired("20051019_38557_0100_PP")
    assert messidor.acquired("IMG_1") is None
    data = ms.load_dataset("messidor", root=standin, size=16)["Brest"]
    order = np.argsort(np.asarray(data.acquired), kind="stable")
    keys = [tuple(map(int, data.ids[i].split("/")[1].split("_")[:2])) for i in order]
    assert keys == sorted(keys)
    assert keys != [tuple(map(int, id_.split("/")[1].split("_")[:2])) for id_ in data.ids]


def test_the_black_border_is_cut(standin: Path) -> None:
    data = ms.load_dataset("messidor", root=standin, size=24)["St Etienne"]
    assert Counter(data.labels.tolist()) == {0: 6, 1: 6, 2: 6, 3: 6}
    first = index(standin).of("St Etienne")[0]
    number = int(first.id.split("_")[1])
    n = next(n for n in range(3) if 9000 + 5923 * (7 * (4 * n + first.label) % 13) == number)
    expected = picture("CHU de St Etienne", first.label, 200 + n).clip(40, 255)
    np.testing.assert_array_equal(data.images[0].permute(1, 2, 0).numpy(), expected)


def test_headers_are_found_in_any_row_and_sheet(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    book.active.append(["A title"])
    sheet = book.create_sheet("second")
    for row in (
        ["Legend"],
        [],
        ["x", "IMAGE  name", None, "Melanoma "],
        [1, "IMD003", None, "X"],
        [None] * 4,
        [2, 7.0],
    ):
        sheet.append(row)
    book.save(tmp_path / "any.xlsx")
    (tmp_path / "bad.xls").write_bytes(b"\xd0\xcf\x11\xe0 not a workbook")
    opened = Root(tmp_path)
    assert read_sheet(opened, "any.xlsx", ("Image Name", "Melanoma")) == [
        {"Image Name": "IMD003", "Melanoma": "X"},
        {"Image Name": "7", "Melanoma": ""},
    ]
    with pytest.raises(ms.MergestreamError, match=r"not a readable \.xls file"):
        read_sheet(opened, "bad.xls", ("Image Name",))


def test_zips_inside_a_zip_are_read(standin: Path, tmp_path: Path) -> None:
    """Also deflated ones; what is unpacked beside its archive counts once; a damaged one is named."""
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(standin.rglob("*")):
            if path.is_file():
                archive.write(path, f"Messidor/{path.relative_to(standin)}")
        archive.writestr("Messidor/Base34.zip", b"unpacked already")
    assert samples(index(tmp_path / "all.zip")) == samples(index(standin))
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("Base34.zip", b"damaged")
    with pytest.raises(ms.MergestreamError, match=r"Base34\.zip in .*bad\.zip is not a readable zip"):
        Root(tmp_path / "bad.zip")


def test_the_publishers_corrected_tables_are_read(root: Path) -> None:
    before = samples(index(root))
    table = next(path for path in root.rglob("*") if path.name.lower() == "annotation_base11.xls")
    table.rename(table.with_name("Annotation_Base11_update20161024.xls"))
    assert samples(index(root)) == before
