"""Roots, decoding and its cache, verification, and the `data` commands; real sets where they are at hand."""

import errno
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mergestream as ms
from benching import command
from mergestream.data.datasets import DATASETS, decoding, file_source_of
from mergestream.data.datasets.dataset_sources import FileSource, verify
from mergestream.data.datasets.decoding import Decoding, crop_border, decode, read_pixels
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.standins.drawing import encoded, picture
from mergestream.data.datasets.verification_report import describe_verification
from mergestream.data.streams import create_stream
from mergestream.training import split
from pictures import write_picture
from test_streams import PACS

REAL = Path(__file__).parent.parent.parent / "shared" / "data"
ON_DISK = [name for name, source in DATASETS.items() if isinstance(source, FileSource)]


def real(name: str) -> Path:
    path = REAL / name
    if not path.exists():
        pytest.skip(f"{name} is not at hand: it lies in ../shared/data beside the checkout")
    return path


# --- roots ------------------------------------------------------------------------------------------------


def test_a_root_reads_folders_and_the_zips_in_them_alike(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("plain")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("inside/y.txt", "zipped")
        archive.writestr("__MACOSX/inside/._y.txt", "crumb")
        archive.writestr("../escape.txt", "no")
    root = Root(tmp_path)
    assert root.files == ("a/x.txt", "b/inside/y.txt")
    assert root.read("a/x.txt") == b"plain"
    assert root.read("b/inside/y.txt") == b"zipped"
    with pytest.raises(ms.MergestreamError, match="no file"):
        root.read("../escape.txt")


def test_what_is_unpacked_beside_its_zip_counts_once(tmp_path: Path) -> None:
    DATASETS["pacs"].write_standin(tmp_path)
    whole = ms.load_dataset("pacs", root=tmp_path, size=16)
    shutil.make_archive(str(tmp_path / "kfold"), "zip", tmp_path / "kfold")
    again = ms.load_dataset("pacs", root=tmp_path, size=16)
    assert {d: again[d].fingerprint() for d in again} == {d: whole[d].fingerprint() for d in whole}


def test_a_link_that_points_upwards_ends(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    write_picture(tmp_path / "deep" / "x.png", picture("a", 0, 0))
    assert "deep/x.png" in Root(tmp_path).files


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as archive:
        archive.writestr("PACS/x.png", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("PACS/x.png", b"2")
    with pytest.raises(ms.MergestreamError, match=r"two files called PACS/x\.png"):
        Root(tmp_path / "twice.zip")


def test_a_locked_or_damaged_zip_is_told(tmp_path: Path) -> None:
    DATASETS["folder"].write_standin(tmp_path / "data")
    path = Path(shutil.make_archive(str(tmp_path / "data"), "zip", tmp_path / "data"))
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        first = archive.infolist()[-1]
    content[first.header_offset + 40 : first.header_offset + 60] = b"\xff" * 20
    path.write_bytes(bytes(content))
    dataset = ms.load_dataset("folder", root=path, size=16)
    with pytest.raises(ms.MergestreamError, match="1 images of 'folder' are missing or cannot be read"):
        [dataset[domain] for domain in dataset]


# --- a user's own data --------------------------------------------------------------------------------------


def write_rows(folder: Path, *rows: str, header: str = "image,label,domain") -> Path:
    for number in range(4):
        write_picture(folder / f"{number}.png", picture("x", number, number))
    (folder / "samples.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (["0.png,a,x", "0.png,b,x"], "one id: '0.png'"),
        (["0.png,a,x", "1.png,b,x", "2.png,a,y"], "domain 'y' of 'table' has no image of the class 'b'"),
        (["0.png,a,x", "1.png,b,"], "Line 3 of samples.csv has an empty"),
        (["0.png,a,x", "9.png,a,x"], r"1 images of 'table' are missing.*9\.png: is missing.*--skip-bad 1"),
        (["0.png,a"], "Line 2 of samples.csv"),
        ([], "no image in the domain|needs distinct classes"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, rows: list[str], sentence: str) -> None:
    with pytest.raises(ms.MergestreamError, match=sentence):
        ms.load_dataset("table", root=write_rows(tmp_path, *rows), size=8)


def test_tables_semicolons_marks_and_another_order_of_classes(tmp_path: Path) -> None:
    write_rows(tmp_path, "0.png;b;x", "1.png;a;x", header="image;label;domain")
    text = (tmp_path / "samples.csv").read_text()
    (tmp_path / "samples.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    data = ms.load_dataset("table", root=tmp_path, size=8)["x"]
    assert (data.classes, data.labels.tolist()) == (("a", "b"), [1, 0])
    other = ms.load_dataset("table", root=tmp_path, size=8, classes=("b", "a"))["x"]
    assert (other.classes, other.labels.tolist()) == (("b", "a"), [0, 1])
    with pytest.raises(ms.MergestreamError, match="label 'b', none of"):
        ms.load_dataset("table", root=tmp_path, size=8, classes=("a", "c"))
    with pytest.raises(ms.MergestreamError, match="lacks the column domain"):
        ms.load_dataset("table", root=write_rows(tmp_path, "0.png,a", header="image,label"), size=8)


def test_a_class_may_be_missing_where_that_is_said(tmp_path: Path) -> None:
    DATASETS["folder"].write_standin(tmp_path)
    shutil.rmtree(tmp_path / "lyon" / "malignant")
    with pytest.raises(ms.MergestreamError, match=r"'lyon' of 'folder' has no image of the class 'malignant'.*allow"):
        ms.load_dataset("folder", root=tmp_path, size=8)
    verified = command("data", "verify", "folder", str(tmp_path))
    assert verified.returncode == 1
    assert "lyon has no image of 'malignant'.\nIf that is right for this site, train" in verified.stdout
    assert "with --allow-missing-classes." in verified.stdout
    dataset = ms.load_dataset("folder", root=tmp_path, size=8, allow_missing_classes=True)
    assert dataset["lyon"].class_counts() == {"benign": 6, "malignant": 0, "normal": 6}
    assert dataset["brest"].classes == dataset["lyon"].classes  # no label has shifted


def test_an_empty_domain_is_refused(tmp_path: Path) -> None:
    DATASETS["pacs"].write_standin(tmp_path)
    for image in (tmp_path / "kfold" / "photo").rglob("*.jpg"):
        image.unlink()
    (tmp_path / "kfold" / "photo" / "readme.txt").write_text("gone")
    with pytest.raises(ms.MergestreamError, match="no image in the domain 'photo'"):
        ms.load_dataset("pacs", root=tmp_path, size=8)


def test_folders_tell_of_what_they_do_not_read(tmp_path: Path) -> None:
    DATASETS["folder"].write_standin(tmp_path)
    (tmp_path / "lyon" / "benign" / "scan.gif").write_bytes(b"GIF89a")
    assert [each.what for each in ms.load_dataset("folder", root=tmp_path, size=8).left_out] == ["lyon/benign/scan.gif"]
    (tmp_path / "graz").mkdir()
    with pytest.raises(ms.MergestreamError, match="no image in the domain 'graz'"):
        ms.load_dataset("folder", root=tmp_path, size=8)


def test_two_spellings_of_one_domain_are_refused(tmp_path: Path) -> None:
    DATASETS["office_home"].write_standin(tmp_path)
    inside = tmp_path / "OfficeHomeDataset_10072016"
    shutil.copytree(inside / "Real World", inside / "Real_World")
    with pytest.raises(ms.MergestreamError, match=r"two folders of one domain.*Real World.*Real_World"):
        ms.load_dataset("office_home", root=tmp_path, size=8)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    DATASETS["folder"].write_standin(tmp_path)
    (tmp_path / "lyon").rename(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    with pytest.raises(ms.MergestreamError, match=r"not UTF-8: caf\\udce9"):
        ms.load_dataset("folder", root=tmp_path, size=8)


def test_tables_numbers_as_times_index_columns_and_repeated_headers(tmp_path: Path) -> None:
    header = ",image,label,domain,acquired,scanner,dose"
    rows = [f"{n},{n}.png,{'ab'[n % 2]},x,{(10, 9, 100, 1)[n]},S{n % 2},{n}.5" for n in range(4)]
    write_rows(tmp_path, *rows, header=header)
    write_picture(tmp_path / "spare.png", picture("spare", 0, 0))
    dataset = ms.load_dataset("table", root=tmp_path, size=8)
    data = dataset["x"]
    assert set(data.subgroups) == {"scanner"}  # neither the index of pandas nor a value of its own for every image
    assert {each.what for each in dataset.left_out} == {"the column 'dose'", "spare.png"}
    order = create_stream("temporal", data.labels, batch_size=1, acquired=data.acquired)
    assert [int(batch[0]) for batch in order] == [3, 1, 0, 2]
    write_rows(tmp_path, "0.png,a,x,b", header="image,label,domain,label")
    with pytest.raises(ms.MergestreamError, match="column label twice"):
        ms.load_dataset("table", root=tmp_path, size=8)


# --- pixels -------------------------------------------------------------------------------------------------


def test_pixels_are_the_files_own(tmp_path: Path) -> None:
    drawn = picture("x", 1, 2, pixels=20)
    for suffix in (".png", ".bmp", ".tiff"):
        assert np.array_equal(read_pixels(encoded(drawn, suffix), f"a{suffix}").permute(1, 2, 0).numpy(), drawn)
    grey = Image.fromarray(drawn[..., 0])
    grey.save(tmp_path / "grey.png")
    pixels = read_pixels((tmp_path / "grey.png").read_bytes(), "grey.png")
    assert all(np.array_equal(channel.numpy(), drawn[..., 0]) for channel in pixels)
    Image.fromarray(drawn).convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "palette.png")
    Image.fromarray(np.dstack([drawn, np.full(drawn.shape[:2], 9, np.uint8)])).save(tmp_path / "clear.png")
    assert read_pixels((tmp_path / "palette.png").read_bytes(), "p.png").shape == (3, 20, 20)
    assert np.array_equal(read_pixels((tmp_path / "clear.png").read_bytes(), "c.png")[0].numpy(), drawn[..., 0])


def test_sixteen_bits_are_stretched_not_clipped(tmp_path: Path) -> None:
    ramp = np.linspace(1000, 4000, 64).reshape(8, 8).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    pixels = read_pixels((tmp_path / "deep.png").read_bytes(), "deep.png")[0].numpy()
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert (np.diff(pixels.reshape(-1).astype(int)) >= 0).all()
    assert len(np.unique(pixels)) == 64


def test_resizing_is_what_the_pool_would_do(tmp_path: Path) -> None:
    """Decoded at the network's size, images reach it as if the pool had resized them."""
    DATASETS["folder"].write_standin(tmp_path)
    preprocessing = ms.Preprocessing(size=(16, 16), interpolation="bicubic")
    native = ms.load_dataset("folder", root=tmp_path, size=24)["lyon"]
    resized = ms.load_dataset("folder", root=tmp_path, size=16, interpolation="bicubic")["lyon"]
    assert torch.equal(preprocessing(native.images), preprocessing(resized.images))


def test_the_black_border_is_cut() -> None:
    image = torch.full((3, 10, 12), 5, dtype=torch.uint8)
    image[:, 2:7, 3:9] = 200
    assert torch.equal(crop_border(image), torch.full((3, 5, 6), 200, dtype=torch.uint8))
    assert torch.equal(crop_border(torch.zeros(3, 4, 4, dtype=torch.uint8)), torch.zeros(3, 4, 4, dtype=torch.uint8))


# --- the cache ------------------------------------------------------------------------------------------------


def test_decoding_is_kept_and_noticed_when_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, cache = tmp_path / "data", tmp_path / "kept"
    DATASETS["folder"].write_standin(data)
    first = ms.load_dataset("folder", root=data, size=16, cache_folder=cache)["lyon"]
    counted: list[str] = []
    reading = decoding.read_pixels
    monkeypatch.setattr(decoding, "read_pixels", lambda c, n: counted.append(n) or reading(c, n))
    again = ms.load_dataset("folder", root=data, size=16, cache_folder=cache)["lyon"]
    assert torch.equal(first.images, again.images)
    assert counted == []
    write_picture(data / "lyon" / "benign" / "0.png", picture("other", 1, 1))
    changed = ms.load_dataset("folder", root=data, size=16, cache_folder=cache)["lyon"]
    assert len(counted) == 18
    assert changed.fingerprint() != first.fingerprint()


def test_what_could_not_be_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that was away for a moment must not stand in the cache for ever."""
    data, cache = tmp_path / "data", tmp_path / "kept"
    DATASETS["folder"].write_standin(data)
    reading = Root.read

    def away(self: Root, path: str, first: int = -1) -> bytes:
        if "benign" in path:
            raise OSError(errno.EIO, "Input/output error")
        return reading(self, path, first)

    monkeypatch.setattr(Root, "read", away)
    with pytest.raises(ms.MergestreamError, match=r"6 images of 'folder'.*Input/output error"):
        ms.load_dataset("folder", root=data, size=16, cache_folder=cache)["lyon"]
    monkeypatch.undo()
    mended = ms.load_dataset("folder", root=data, size=16, cache_folder=cache)["lyon"]
    assert mended.fingerprint() == ms.load_dataset("folder", root=data, size=16)["lyon"].fingerprint()


@pytest.mark.parametrize("damage", ["short", "empty", "no notes", "foreign"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: str) -> None:
    data, cache = tmp_path / "data", tmp_path / "kept"
    DATASETS["folder"].write_standin(data)
    first = ms.load_dataset("folder", root=data, size=16, cache_folder=cache)["lyon"].images.clone()
    (array,), (notes,) = cache.glob("*.npy"), cache.glob("*.json")
    if damage == "no notes":
        notes.unlink()
    else:
        whole = array.read_bytes()
        array.write_bytes({"short": whole[:-100], "empty": b"", "foreign": b"PK" + whole[2:]}[damage])
    assert torch.equal(ms.load_dataset("folder", root=data, size=16, cache_folder=cache)["lyon"].images, first)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DATASETS["folder"].write_standin(tmp_path / "data")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    dataset = ms.load_dataset("folder", root=tmp_path / "data", size=16, cache_folder=tmp_path / "kept")
    with pytest.raises(ms.MergestreamError, match=r"No space left on device\. Free some space"):
        dataset["lyon"]
    assert not [path for path in (tmp_path / "kept").iterdir() if not path.name.endswith(".lock")]


@pytest.mark.slow
def test_two_processes_decode_once(tmp_path: Path) -> None:
    """The second waits for the first, and then maps what it wrote."""
    DATASETS["folder"].write_standin(tmp_path / "data")
    script = (
        "import sys, mergestream as ms; from mergestream.data.datasets import decoding; read = decoding.read_pixels\n"
        "import time; decoding.read_pixels = lambda c, n: (print('read', flush=True), time.sleep(0.1), read(c, n))[2]\n"
        "ms.load_dataset('folder', root=sys.argv[1], size=16, cache_folder=sys.argv[2])['lyon']"
    )
    line = [sys.executable, "-c", script, str(tmp_path / "data"), str(tmp_path / "kept")]
    processes = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sorted(text.count("read") for text in outputs) == [0, 18]


def test_decoding_in_threads_keeps_the_order_and_names_the_bad(tmp_path: Path) -> None:
    DATASETS["folder"].write_standin(tmp_path)
    root, index = file_source_of("folder").index(tmp_path)
    one, many = (decode(root, index.samples, Decoding((16, 16), workers=n))[0] for n in (1, 8))
    assert torch.equal(one, many)
    (tmp_path / index.samples[3].file).write_bytes(b"")
    assert list(decode(root, index.samples, Decoding((16, 16)))[1]) == [3]


# --- verification and the command line ------------------------------------------------------------------------


def test_verify_names_what_is_missing_unreadable_and_different(tmp_path: Path) -> None:
    written = command("data", "fake", "midog", str(tmp_path / "m"))
    assert written.returncode == 0, written.stderr
    assert "not data" in written.stdout
    source = file_source_of("midog")
    verification = verify(source, tmp_path / "m")
    assert not verification.complete  # a stand-in has not the published counts
    _, index = source.index(tmp_path / "m")
    (tmp_path / "m" / index.samples[0].file).unlink()
    (tmp_path / "m" / index.samples[1].file).write_bytes(b"broken")
    verified = command("data", "verify", "midog", str(tmp_path / "m"))
    assert verified.returncode == 1
    for word in (
        index.samples[0].id,
        index.samples[1].file,
        "Missing, 1",
        "Unreadable, 1",
        "NOT complete",
        "published",
    ):
        assert word in verified.stdout
    asked = command("data", "verify", "midog", str(tmp_path / "m"), "--json")
    assert asked.returncode == 1
    report = json.loads(asked.stdout)
    assert report["complete"] is False
    assert report["missing"] == [index.samples[0].id]
    assert report["differing"]["canine lymphoma"]["published"] == 3959


@pytest.mark.parametrize("name", ON_DISK)
def test_every_stand_in_is_written_and_verified_by_the_command_line_code(name: str, tmp_path: Path) -> None:
    source = file_source_of(name)
    source.write_standin(tmp_path)
    verification = verify(source, tmp_path)
    assert verification.usable > 0
    assert not verification.index.missing
    assert not verification.unreadable
    assert verification.usable <= verification.index.images_found
    assert verification.complete == (
        not verification.published and not verification.index.total
    )  # tiny, they differ from every published count


@pytest.mark.parametrize(
    ("name", "lost", "sentence_part"),
    [
        ("messidor", "Annotation_Base11.xls", "published 1,187"),
        ("histopantum", "stomach/non", "no image of"),
        ("folder", "lyon/benign", "no image of 'benign'"),
    ],
)
def test_an_incomplete_copy_is_never_called_complete(name: str, lost: str, sentence_part: str, tmp_path: Path) -> None:
    """Also of sets whose counts per domain nobody published."""
    source = file_source_of(name)
    source.write_standin(tmp_path)
    for path in sorted(tmp_path.rglob("*")):
        if lost in path.as_posix() and path.is_file():
            path.unlink()
    verification = verify(source, tmp_path)
    assert not verification.complete
    assert any(sentence_part in sentence for sentence in describe_verification(verification))


def test_data_list_and_bad_names() -> None:
    listed = command("data", "list")
    assert listed.returncode == 0
    for name in DATASETS:
        assert f"\n{name}: " in f"\n{listed.stdout}"
    cards = json.loads(command("data", "list", "--json").stdout)
    assert [card["name"] for card in cards] == list(DATASETS) == ms.list_datasets()
    assert all(card["licence"] and card["source"] and card["layout"] for card in cards)
    with pytest.raises(ms.MergestreamError, match="Did you mean 'pacs'"):
        file_source_of("pasc")
    with pytest.raises(ms.MergestreamError, match="generated"):
        file_source_of("phantom")


def test_verify_takes_the_options_it_asks_for(tmp_path: Path) -> None:
    write_rows(tmp_path, "0.png,a,x", "1.png,b,x")
    shutil.copy(tmp_path / "samples.csv", tmp_path / "other.csv")
    source = file_source_of("table")
    with pytest.raises(ms.MergestreamError, match=r"csv='samples\.csv'"):
        verify(source, tmp_path)
    assert verify(source, tmp_path, csv="samples.csv").usable == 2


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": "32"}, {"size": (8,)}, {"interpolation": "foo"}])
def test_a_wrong_size_or_interpolation_is_refused_at_once(wrong: dict, tmp_path: Path) -> None:
    DATASETS["folder"].write_standin(tmp_path)
    with pytest.raises(ms.MergestreamError, match=r"size is|interpolation"):
        ms.load_dataset("folder", root=tmp_path, **wrong)


def test_fake_never_writes_over_anything(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    refused = command("data", "fake", "pacs", str(tmp_path / "mine"))
    assert refused.returncode == 1
    assert "not replaced" in refused.stderr
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"


@pytest.mark.slow
def test_real_pacs_is_complete() -> None:
    done = command("data", "verify", "pacs", str(real("pacs-128.zip")))
    assert done.returncode == 0, done.stderr
    assert "9,991 usable of 9,991 images." in done.stdout
    assert "Complete: every image can be read, and the counts are the published ones" in done.stdout


@pytest.mark.slow
def test_real_midog_is_complete_and_says_what_it_leaves_out() -> None:
    done = command("data", "verify", "midog", str(real("midog25-64.zip")))
    assert done.returncode == 0, done.stderr
    assert "11,935 usable of 11,936 images." in done.stdout
    assert "8925" in done.stdout
    assert "its rows in the CSV differ" in done.stdout


def test_the_counts_that_streams_are_tested_on_are_those_of_the_real_set() -> None:
    _, index = file_source_of("pacs").index(real("pacs-128.zip"))
    assert {domain: list(of.values()) for domain, of in index.counts().items()} == {
        domain: list(counts) for domain, counts in PACS.items()
    }


# --- splits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_split_never_cuts_a_group(seed: int) -> None:
    groups = [f"slide{n}" for n in np.random.RandomState(seed).randint(12, size=100)]
    training, validation = split(100, 0.2, seed, groups)
    assert sorted(torch.cat([training, validation]).tolist()) == list(range(100))
    assert not {groups[i] for i in training} & {groups[i] for i in validation}
    assert 20 <= len(validation) <= 20 + max(groups.count(g) for g in set(groups))
    again = split(100, 0.2, seed, groups)
    assert torch.equal(training, again[0])
    other = split(100, 0.2, seed + 1, groups)
    assert not torch.equal(training, other[0])


def test_a_split_keeps_a_group_for_training_and_needs_two() -> None:
    training, validation = split(10, 0.5, 0, ["big"] * 9 + ["small"])
    assert len(training) > 0
    assert len(validation) > 0
    with pytest.raises(ms.MergestreamError, match="one group"):
        split(4, 0.5, 0, ["only"] * 4)
