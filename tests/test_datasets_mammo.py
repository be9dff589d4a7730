"""Mammography: the three layouts, swapped crops and masks, and what the tables get wrong."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import mergestream as ms
from mergestream.data.datasets import DATASETS
from mergestream.data.datasets.decoding import read_pixels
from mergestream.data.datasets.index import Index
from mergestream.data.datasets.mammo import FINDINGS, crop_of, files_by_subject, read_lesions
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.standins.drawing import encoded
from mergestream.data.datasets.standins.fake_mammo import (
    CROP,
    FULL,
    MANIFEST,
    images_of,
    lesions,
    uid,
    write_csv,
    write_mammo,
    write_tables,
)
from mergestream.data.datasets.standins.fake_organs import FakeImage, write_medimeta
from mergestream.runtime.errors import DataError
from pictures import write_picture


def write_descriptive(folder: Path) -> None:
    """The downloader's other style of folder names."""
    write_mammo(folder)
    for subject in (folder / MANIFEST / "CBIS-DDSM").iterdir():
        for study in list(subject.iterdir()):
            for series in list(study.iterdir()):
                series.rename(study / f"1.000000-images-{series.name[-5:]}")
            study.rename(subject / f"07-20-2016-DDSM-NA-{study.name[-5:]}")


def write_kaggle(folder: Path) -> None:
    """csv/ and jpeg/: the table's paths begin with a folder that the download does not have."""
    rows = [["file_path", "image_path", "PatientID", "SeriesDescription", "SeriesInstanceUID"]]
    write_tables(folder / "csv")
    for lesion in (each for finding in FINDINGS for each in lesions(finding)):
        for subject, kind, files in images_of(lesion):
            for number, pixels in enumerate(files, start=1):
                file = f"{uid(subject, kind)}/{number}-{lesion.number:03d}"
                bright = (pixels / max(int(pixels.max()), 1) * 255).astype(np.uint8)
                write_picture(folder / "jpeg" / f"{file}.jpg", bright)
                names = [f"CBIS-DDSM/dicom/{file}.dcm", f"CBIS-DDSM/jpeg/{file}.jpg"]
                # Hundreds of rows name no series description.
                rows.append([*names, subject, "" if lesion.number % 3 == 0 else kind, uid(subject, kind)])
    write_csv(folder / "csv" / "dicom_info.csv", rows)


def write_mammo_medimeta(folder: Path, *, with_view: bool = True) -> None:
    for finding in FINDINGS:
        rows = []
        for each in lesions(finding):
            columns = {"patient_id": f"P_{each.patient:05d}", "breast_density": str(each.density)}
            if with_view:
                columns["image_view"] = each.view
            part = "val" if each.patient in (2, 6) else each.part
            rows.append(FakeImage(each.pixels((24, 24)), int(each.pathology == "MALIGNANT"), part, columns))
        write_medimeta(folder / f"mammo_{finding}", "pathology", ("benign", "malignant"), rows)


WRITERS = {
    "tcia": write_mammo,
    "descriptive": write_descriptive,
    "kaggle": write_kaggle,
    "medimeta": write_mammo_medimeta,
}
FOUR = ("mass_cc", "mass_mlo", "calc_cc", "calc_mlo")
FIRST = "Mass-Training_P_00000_LEFT_CC_1"


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, write in WRITERS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        write(folders[name])
    return folders


@pytest.fixture
def tcia(roots: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(roots["tcia"], tmp_path / "copy"))


def index(root: Path, **options: object) -> Index:
    return DATASETS["mammo"].index(root, **options)[1]


def known(contents: Index) -> Counter[tuple[object, ...]]:
    """What is known of the samples, whatever their files are called."""
    return Counter((s.domain, s.label, s.group, tuple(sorted(s.subgroups.items()))) for s in contents.samples)


@pytest.mark.parametrize("layout", list(WRITERS))
@pytest.mark.parametrize("domain", [None, "finding", "density"])
def test_every_layout_tells_the_same(roots: dict[str, Path], layout: str, domain: str | None) -> None:
    contents = index(roots[layout], domain=domain)
    assert known(contents) == known(index(roots["tcia"], domain=domain))
    assert not contents.missing
    assert (
        contents.card.domains
        == {
            None: FOUR,
            "finding": ("mass", "calc"),
            "density": ("density_1", "density_2", "density_3", "density_4"),
        }[domain]
    )


def found_at(file: str, layout: str) -> str:
    """1-1.dcm and 1-2.dcm from TCIA; here 1-041.jpg and 2-041.jpg from Kaggle."""
    name = Path(file).stem
    return "first" if name.startswith("1-1" if layout != "kaggle" else "1-") else "second"


def as_stored(pixels: np.ndarray, layout: str) -> torch.Tensor:
    """What a drawing [H,W] becomes: through JPEG, or 16 bits stretched over their range."""
    if layout == "kaggle":
        bright = (pixels.astype(np.uint16) * 257 / (int(pixels.max()) * 257) * 255).astype(np.uint8)
        return read_pixels(encoded(bright, ".jpg"), "1.jpg")
    low, high = int(pixels.min()), int(pixels.max())
    return torch.from_numpy(np.round((pixels - low) * (255 / (high - low))).astype(np.uint8)).expand(3, -1, -1)


@pytest.mark.parametrize("layout", ["tcia", "descriptive", "kaggle"])
def test_the_crop_is_told_by_content_not_by_name(roots: dict[str, Path], layout: str) -> None:
    """Half of the crops are 1-1, half are 1-2; some lie in a series of their own."""
    contents = index(roots[layout])
    positions = Counter(found_at(sample.file, layout) for sample in contents.samples)
    assert min(positions["first"], positions["second"]) >= 10
    dataset = ms.load_dataset("mammo", root=roots[layout], size=CROP)
    for finding in ("mass", "calc"):
        for view in ("cc", "mlo"):
            drawn = {e.subject: e.pixels(CROP) for e in lesions(finding) if e.view.lower() == view}
            data = dataset[f"{finding}_{view}"]
            assert set(data.ids) == set(drawn)
            for id_, image in zip(data.ids, data.images, strict=True):
                assert torch.equal(image, as_stored(drawn[id_], layout))


def test_labels_groups_and_parts(roots: dict[str, Path]) -> None:
    samples = {sample.id: sample for sample in index(roots["tcia"]).samples}
    assert len(samples) == 40
    callback = samples["Calc-Training_P_00001_LEFT_MLO_1"]  # BENIGN_WITHOUT_CALLBACK
    assert (callback.label, callback.group, callback.part, callback.domain) == (0, "P_00001", "train", "calc_mlo")
    assert callback.subgroups == {"density": "2", "finding": "calc", "view": "mlo"}
    malignant = samples["Mass-Test_P_00007_LEFT_CC_1"]
    assert (malignant.label, malignant.part, malignant.subgroups["density"]) == (1, "test", "4")
    assert samples["Mass-Training_P_00005_LEFT_CC_2"].label == 0
    assert len(index(roots["tcia"], part="test").samples) == 8


def test_a_mammogram_is_malignant_if_any_of_its_lesions_is(roots: dict[str, Path]) -> None:
    for layout in ("tcia", "kaggle"):
        contents = index(roots[layout], image="full")
        labels = {sample.id: sample.label for sample in contents.samples}
        assert len(labels) == 32
        assert labels["Mass-Training_P_00005_LEFT_CC"] == 1  # its second lesion is benign
        assert labels["Mass-Training_P_00001_LEFT_CC"] == 0
        assert [each.what for each in contents.left_out] == ["40 lesions"]
        dataset = ms.load_dataset("mammo", root=roots[layout], image="full", size=FULL)
        five = next(e for e in lesions("mass") if e.patient == 5)
        position = list(dataset["mass_cc"].ids).index(five.mammogram)
        drawn = five.pixels(FULL).astype(float)
        image = dataset["mass_cc"].images[position, 0].numpy()
        assert np.corrcoef(drawn.ravel(), image.ravel())[0, 1] > 0.98
    with pytest.raises(DataError, match="crops only"):
        index(roots["medimeta"], image="full")


def test_medimeta_has_a_val_part_and_may_lack_the_view(roots: dict[str, Path], tmp_path: Path) -> None:
    assert {sample.group for sample in index(roots["medimeta"], part="val").samples} == {"P_00002", "P_00006"}
    with pytest.raises(ms.MergestreamError, match="no part of 'mammo' called 'val'"):
        index(roots["tcia"], part="val")
    write_mammo_medimeta(tmp_path, with_view=False)
    contents = index(tmp_path)
    assert contents.card.domains == ("mass", "calc")
    assert contents.samples[0].subgroups == {"density": "1", "finding": "mass", "view": "unknown"}
    with pytest.raises(DataError, match="no image in the domain"):
        ms.load_dataset("mammo", root=tmp_path, domain="finding_view")


def test_one_medimeta_folder_is_not_enough(roots: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(roots["medimeta"] / "mammo_mass", tmp_path / "mammo_mass")
    with pytest.raises(DataError, match="MedIMeta folder mammo_calc"):
        index(tmp_path)
    shutil.copy(roots["tcia"] / "mass_case_description_train_set.csv", tmp_path)
    with pytest.raises(DataError, match="both CBIS-DDSM and MedIMeta"):
        index(tmp_path)


def test_options_are_checked(roots: dict[str, Path]) -> None:
    with pytest.raises(ms.MergestreamError, match="Did you mean 'density'"):
        index(roots["tcia"], domain="densities")
    with pytest.raises(ms.MergestreamError, match="'mask' is not a choice for 'image'"):
        index(roots["tcia"], image="mask")


def folder_of(root: Path, subject: str) -> Path:
    return root / MANIFEST / "CBIS-DDSM" / subject


def test_absent_files_are_missing_and_masks_do_not_stand_in(tcia: Path) -> None:
    shutil.rmtree(folder_of(tcia, FIRST))
    only_mask = folder_of(tcia, "Calc-Training_P_00006_LEFT_CC_1")
    shutil.rmtree(next(only_mask.glob(f"*/{uid(only_mask.name, 'cropped images')}")))
    assert index(tcia).missing == (f"{FIRST} (crop)", "Calc-Training_P_00006_LEFT_CC_1 (crop)")
    with pytest.raises(DataError, match=r"2 images of 'mammo' are missing .*--skip-bad 2"):
        ms.load_dataset("mammo", root=tcia)
    assert len(ms.load_dataset("mammo", root=tcia, skip_bad=2, size=8)["mass_cc"]) == 9


def test_a_lone_crop_is_used(tcia: Path) -> None:
    lone = folder_of(tcia, "Calc-Training_P_00006_LEFT_CC_1")
    shutil.rmtree(next(lone.glob(f"*/{uid(lone.name, 'ROI mask images')}")))
    assert not index(tcia).missing


def test_where_sizes_are_alike_grey_values_tell(tmp_path: Path) -> None:
    mask = np.zeros((20, 20), dtype=np.uint8)
    mask[5:15, 5:15] = 255
    crop = np.tile(np.arange(20, dtype=np.uint8) * 12, (20, 1))
    write_picture(tmp_path / "1-1.jpg", mask)
    write_picture(tmp_path / "1-2.jpg", crop)
    assert crop_of(Root(tmp_path), ["1-1.jpg", "1-2.jpg"]) == "1-2.jpg"
    write_picture(tmp_path / "1-1.jpg", crop)
    write_picture(tmp_path / "1-2.jpg", mask)
    assert crop_of(Root(tmp_path), ["1-1.jpg", "1-2.jpg"]) == "1-1.jpg"
    assert crop_of(Root(tmp_path), ["1-2.jpg"]) is None
    assert crop_of(Root(tmp_path), []) is None


def test_what_no_table_names_is_left_out_with_a_reason(tcia: Path) -> None:
    for part in ("train", "test"):
        (tcia / f"calc_case_description_{part}_set.csv").unlink()
    contents = index(tcia)
    assert contents.card.domains == ("mass_cc", "mass_mlo")
    assert [each.what for each in contents.left_out] == ["16 mammograms", "36 other subjects"]
    assert "no case table names them, such as Calc-" in contents.left_out[1].why


def test_half_a_finding_is_refused(tcia: Path) -> None:
    (tcia / "mass_case_description_test_set.csv").unlink()
    with pytest.raises(DataError, match=r"should hold mass_case_description_test_set.csv once"):
        index(tcia)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_bad_rows_are_refused(tcia: Path) -> None:
    table = tcia / "mass_case_description_train_set.csv"
    edit(table, ",MALIGNANT,", ",UNPROVEN,")
    with pytest.raises(DataError, match=r"Row 10 of mass_case.*its pathology is 'UNPROVEN'"):
        index(tcia)
    edit(table, ",UNPROVEN,", ",MALIGNANT,")
    edit(table, "LEFT,CC,2", "LEFT,CC,1")
    with pytest.raises(DataError, match="name Mass-Training_P_00001_LEFT_CC_1 twice"):
        index(tcia)
    edit(table, "pathology", "outcome")
    with pytest.raises(DataError, match="lacks the column pathology"):
        index(tcia)


def test_a_density_outside_the_scale_is_left_out_only_as_a_domain(tcia: Path) -> None:
    edit(tcia / "calc_case_description_train_set.csv", "P_00000,1,LEFT,CC", "P_00000,0,LEFT,CC")
    contents = index(tcia, domain="density")
    assert len(contents.samples) == 39
    assert contents.left_out[-1].why == "its density is density_0"
    assert "Calc-Training_P_00000_LEFT_CC_1" in contents.left_out[-1].what
    assert len(index(tcia).samples) == 40


def test_trailing_line_ends_do_not_shift_rows(roots: dict[str, Path]) -> None:
    raw = (roots["tcia"] / "calc_case_description_train_set.csv").read_text()
    assert '.dcm\n"\n' in raw
    cases = read_lesions(Root(roots["tcia"]))
    assert len(cases) == 40
    assert {case.subgroups["density"] for case in cases} == {"1", "2", "3", "4"}


def test_series_folders_are_found_through_metadata(tcia: Path) -> None:
    """A copy that has lost the folders named by the Subject ID."""
    whole = {subject: len(files) for subject, files in files_by_subject(Root(tcia)).items()}
    for series in list((tcia / MANIFEST / "CBIS-DDSM").glob("*/*/*")):
        series.rename(tcia / MANIFEST / series.name)
    shutil.rmtree(tcia / MANIFEST / "CBIS-DDSM")
    assert {subject: len(files) for subject, files in files_by_subject(Root(tcia)).items()} == whole
    assert not index(tcia).missing


def test_published_lesions_are_asked_for_where_they_are_known(roots: dict[str, Path]) -> None:
    for layout in ("tcia", "kaggle", "medimeta"):
        assert index(roots[layout], domain="finding").card.counts == {"mass": 1696, "calc": 1872}
        assert index(roots[layout]).card.counts == {}
    assert index(roots["tcia"], domain="finding", image="full").card.counts == {}


@pytest.mark.parametrize("layout", ["tcia", "kaggle"])
def test_a_file_of_no_subject_is_told_of(roots: dict[str, Path], layout: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(roots[layout], tmp_path / "copy"))
    kind = ".jpg" if layout == "kaggle" else ".dcm"
    (copy / "strange").mkdir()
    shutil.copy(next(copy.rglob(f"*{kind}")), copy / "strange" / f"1-1{kind}")
    last = index(copy).left_out[-1]
    assert (last.what, last.why) == ("1 other subjects", f"no case table names them, such as strange/1-1{kind}")
