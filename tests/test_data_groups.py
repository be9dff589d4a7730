"""Images of one patient are not divided between training and validation: columns and file names that look like it."""

import csv
from pathlib import Path

import pytest

import mergestream as ms
from benching import command
from mergestream.data.datasets import Dataset
from mergestream.data.datasets.standins.drawing import CLASSES, SITES, picture, write_folder, write_table
from mergestream.runtime.errors import DataError, InputError, UnknownNameError
from mergestream.training.training_loop import split
from pictures import write_picture

COLUMNS = ("patient_id", "Patient", "subject", "SubjectID", "case", "case_number", "slide", "slide name", "lesion_id")


def table_with(folder: Path, column: str, *, unique: bool = False) -> Path:
    """The stand-in of 'table', its column 'group' renamed."""
    write_table(folder)
    rows = list(csv.DictReader((folder / "samples.csv").open()))
    with (folder / "samples.csv").open("w") as file:
        writer = csv.DictWriter(file, [column if name == "group" else name for name in rows[0]])
        writer.writeheader()
        for number, row in enumerate(rows):
            group = row.pop("group")
            writer.writerow({**row, column: number if unique else group})
    return folder


def folder_with(folder: Path, name: str, patients: int = 4, images: int = 3) -> Path:
    """Files of several images per patient, named by a pattern."""
    for site in SITES[:2]:
        for label, class_name in enumerate(CLASSES[:2]):
            for patient in range(patients):
                for number in range(images):
                    file = name.format(patient=patient, number=number, label=label)
                    write_picture(folder / site / class_name / file, picture(site, label, 10 * patient + number, 8))
    return folder


def require_whole_groups(dataset: Dataset, groups: int) -> None:
    for domain in dataset.values():
        assert domain.groups is not None
        assert len(set(domain.groups)) == groups
        for seed in range(5):
            training, validation = (
                {domain.groups[int(i)] for i in part} for part in split(len(domain), 0.3, seed, domain.groups)
            )
            assert training
            assert validation
            assert not training & validation


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_that_looks_like_a_patient_raises_the_question(tmp_path: Path, column: str) -> None:
    root = str(table_with(tmp_path, column))
    with pytest.raises(DataError, match="training and validation") as caught:
        ms.load_dataset("table", root)
    assert f"group={column}" in str(caught.value)
    assert "group=none" in str(caught.value)
    require_whole_groups(ms.load_dataset("table", root, size=8, group=column), 9)
    for independent in ("none", None):
        dataset = ms.load_dataset("table", root, size=8, group=independent)
        assert all(domain.groups is None for domain in dataset.values())


def test_the_group_is_no_subgroup_and_must_be_a_column(tmp_path: Path) -> None:
    root = str(table_with(tmp_path, "slide"))
    assert set(ms.load_dataset("table", root, size=8, group="slide")["lyon"].subgroups) == {"scanner"}
    with pytest.raises(UnknownNameError, match="slides"):
        ms.load_dataset("table", root, group="slides")


def test_a_column_with_another_value_in_every_row_raises_no_question(tmp_path: Path) -> None:
    assert len(ms.load_dataset("table", str(table_with(tmp_path, "case", unique=True)), size=8)["lyon"]) == 18


def test_groups_in_several_domains_are_reported(tmp_path: Path) -> None:
    write_table(tmp_path)
    path = tmp_path / "samples.csv"
    path.write_text(path.read_text().replace("brest-0-0", "lyon-0-0"))
    assert ms.load_dataset("table", str(tmp_path)).overlap == "1 of 26 groups have images in several domains."


@pytest.mark.parametrize("question", ["table", "folder"])
def test_verify_and_train_stop_with_the_question(tmp_path: Path, question: str) -> None:
    if question == "table":
        root, answer = table_with(tmp_path / "data", "patient_id"), "group=patient_id"
    else:
        root, answer = folder_with(tmp_path / "data", "P{patient:03d}_{number}.png"), "group=(.+)_"
    train = ("train", "--dataset", question, "--root", str(root), "--out", str(tmp_path / "pool"), "--init", "random")
    for line in (("data", "verify", question, str(root)), (*train, "--network", "vit_tiny_patch16_224")):
        stopped = command(*line)
        assert stopped.returncode == 1
        assert answer in stopped.stderr
        assert "group=none" in stopped.stderr
    assert not list((tmp_path / "pool").rglob("*.safetensors"))
    for option in (answer, "group=none", *(["group=(P[0-9]+)"] if question == "folder" else [])):
        assert command("data", "verify", question, str(root), "--data-option", option).returncode == 0


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("P{patient:03d}_{number}.png", "(.+)_"),
        ("{patient:02d}-img{number}.png", "[0-9]+"),
        ("slide {patient} tile {number}.png", r"slide (\d+)"),
        ("TCGA-{patient}A.{number}.png", r"(TCGA-\w+)\."),
    ],
)
def test_file_names_that_look_like_a_patient_raise_the_question(tmp_path: Path, name: str, pattern: str) -> None:
    root = str(folder_with(tmp_path, name))
    with pytest.raises(DataError, match="one patient"):
        ms.load_dataset("folder", root)
    require_whole_groups(ms.load_dataset("folder", root, size=8, group=pattern), 4)
    assert ms.load_dataset("folder", root, size=8, group="none")["lyon"].groups is None


@pytest.mark.parametrize("name", ["img_{patient}{number}.png", "v2_{patient}{number}.png", "{patient}{number}.png"])
def test_numbered_file_names_raise_no_question(tmp_path: Path, name: str) -> None:
    assert ms.load_dataset("folder", str(folder_with(tmp_path, name)), size=8)["lyon"].groups is None


def test_a_pattern_must_be_one_and_match(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(InputError, match="regular expression"):
        ms.load_dataset("folder", str(tmp_path), group="(")
    with pytest.raises(DataError, match="does not match the file name '0'"):
        ms.load_dataset("folder", str(tmp_path), group="(P.+)_")
