"""Terra Incognita: LILA's annotation files and DomainBed's folders, odd corners of both."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import pytest

import mergestream as ms
from mergestream.data.datasets import DATASETS, terra
from mergestream.data.datasets.index import Index
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.standins.drawing import picture, write_tree
from mergestream.data.datasets.standins.fake_tables import write_terra
from pictures import write_picture

SPLITS = ("cis_test", "cis_val", "train", "trans_test", "trans_val")
Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def lila(tmp_path: Path) -> Path:
    write_terra(tmp_path)
    return tmp_path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write_terra_tree(tmp_path)
    return tmp_path / "terra_incognita"


def write_terra_tree(folder: Path) -> None:
    """As DomainBed's script arranges it."""
    write_tree(folder / "terra_incognita", terra.CARD, 2, lambda n: f"{uuid5(NAMESPACE_URL, str(n))}.jpg")


def index_of(root: Path) -> Index:
    return DATASETS["terra"].index(root)[1]


def annotations(root: Path, split: str) -> Path:
    return root / "eccv_18_annotation_files" / f"{split}_annotations.json"


def content_of(root: Path, split: str = "train") -> dict[str, Any]:
    return json.loads(annotations(root, split).read_text())


def edit(root: Path, change: Change, split: str = "train") -> None:
    content = content_of(root, split)
    change(content)
    annotations(root, split).write_text(json.dumps(content))


def reasons(index: Index) -> dict[str, str]:
    return {Path(each.what).stem: each.why for each in index.left_out}


def test_annotated_images_are_those_domainbed_selects(lila: Path) -> None:
    """DomainBed's loop, written out: every annotation of every image."""
    expected: dict[str, set[tuple[str, str]]] = {}
    for split in SPLITS:
        content = content_of(lila, split)
        names = {category["id"]: category["name"] for category in content["categories"]}
        for image in content["images"]:
            for annotation in content["annotations"]:
                name = names[annotation["category_id"]]
                if annotation["image_id"] != image["id"] or name not in terra.CARD.classes:
                    continue
                if str(image["location"]) in ("38", "46", "100", "43"):
                    expected.setdefault(image["id"], set()).add((f"location_{image['location']}", name))
    index = index_of(lila)
    labels_by_id = {s.id: {(s.domain, index.card.classes[s.label])} for s in index.samples}
    assert labels_by_id == {id_: pairs for id_, pairs in expected.items() if len(pairs) == 1}
    assert len(expected) - len(labels_by_id) == 1  # a raccoon and an opossum
    assert [(each.what.count(".jpg"), each.why) for each in index.left_out] == [
        (1, "annotated as opossum and raccoon"),
        (0, "show none of the ten classes"),
        (0, "taken at other locations than the four"),
    ]
    assert [each.what for each in index.left_out[1:]] == ["1 images", "1 images"]
    assert index.counts()["location_46"] == {**dict.fromkeys(index.card.classes, 3), "dog": 4}
    assert index.images_found == len(labels_by_id) + 1
    assert index.missing == ()


def test_bursts_and_times_come_from_the_annotations(lila: Path) -> None:
    data = ms.load_dataset("terra", root=lila, size=16)["location_38"]
    listed = {image["id"]: image for split in SPLITS for image in content_of(lila, split)["images"]}
    assert data.groups == [listed[id_]["seq_id"] for id_ in data.ids]
    assert set(Counter(data.groups).values()) == {3}
    assert data.acquired == [listed[id_]["date_captured"].replace(" ", "T") for id_ in data.ids]
    assert list(data.acquired) == sorted(data.acquired)
    assert data.acquired[0] == "2012-05-01T14:43:11"


def test_frames_of_one_second_keep_their_order(lila: Path) -> None:
    def same_second_backwards(content: dict[str, Any]) -> None:
        for image in content["images"]:
            image.update(date_captured=image["date_captured"][:-2] + "00", frame_num=10 - image["frame_num"])

    before = index_of(lila).of("location_43")
    for split in SPLITS:
        edit(lila, same_second_backwards, split)
    after = index_of(lila).of("location_43")
    assert [s.id for s in after[:3]] == [s.id for s in before[2::-1]]
    assert [s.group for s in after] == [s.group for s in before]


@pytest.mark.parametrize("time", [None, "", "yesterday", 7])
def test_a_location_without_a_time_for_every_image_has_none(lila: Path, time: object) -> None:
    edit(lila, lambda content: content["images"][-1].update(date_captured=time), "trans_test")
    # The image is in another file too, which was read before and knows the time.
    dataset = ms.load_dataset("terra", root=lila, size=16)
    assert dataset["location_100"].acquired is not None
    edit(lila, lambda content: content["images"][0].update(date_captured=time))
    dataset = ms.load_dataset("terra", root=lila, size=16)
    assert dataset["location_100"].acquired is None
    assert dataset["location_38"].acquired is not None


def test_a_location_may_be_text(lila: Path) -> None:
    numbered = index_of(lila)
    for split in SPLITS:
        edit(lila, lambda c: [image.update(location=str(image["location"])) for image in c["images"]], split)
    assert index_of(lila) == numbered


def test_an_image_that_two_files_list_counts_once_if_they_agree(lila: Path) -> None:
    twice = content_of(lila, "trans_test")["images"][-1]
    assert twice == content_of(lila)["images"][0]
    whole = index_of(lila)
    assert sum(sample.id == twice["id"] for sample in whole.samples) == 1

    annotation = content_of(lila)["annotations"][0]
    assert annotation["image_id"] == twice["id"]
    edit(lila, lambda content: content["annotations"][0].update(category_id=16))
    disagree = index_of(lila)
    assert reasons(disagree)[twice["id"]] == "annotated as bird and cat"
    assert len(disagree.samples) == len(whole.samples) - 1

    edit(lila, lambda content: content["annotations"][0].update(category_id=11))
    edit(lila, lambda content: content["images"][0].update(location=46))
    assert reasons(index_of(lila))[twice["id"]] == "listed at the locations 100 and 46"


def test_an_absent_image_is_missing_and_an_unlisted_one_left_out(lila: Path) -> None:
    whole = index_of(lila)
    victim = whole.samples[5]
    (lila / victim.file).unlink()
    write_picture(lila / "more" / "visitor.jpg", picture("visitor", 0, 0))
    index = index_of(lila)
    assert index.missing == (f"{victim.id}.jpg",)
    assert reasons(index)["visitor"] == "in no annotation file"
    with pytest.raises(ms.MergestreamError, match=rf"{victim.id}.jpg: is missing.*--skip-bad 1"):
        ms.load_dataset("terra", root=lila)
    data = ms.load_dataset("terra", root=lila, size=16, skip_bad=1)[victim.domain]
    assert len(data) == len(whole.of(victim.domain)) - 1


def test_an_absent_image_that_would_not_be_used_is_not_missing(lila: Path) -> None:
    for each in index_of(lila).left_out:
        if each.what.endswith(".jpg"):
            (lila / each.what).unlink()
    index = index_of(lila)
    assert index.missing == ()
    assert all("annotated as" not in each.why for each in index.left_out)


def test_images_are_found_in_any_folder_and_format(lila: Path) -> None:
    before = index_of(lila)
    victim = before.samples[0]
    write_picture(lila / "elsewhere" / f"{victim.id.upper()}.png", picture("x", 0, 0))
    (lila / victim.file).unlink()
    after = index_of(lila)
    assert [s.id for s in after.samples] == [s.id for s in before.samples]
    assert after.samples[0].file == f"elsewhere/{victim.id.upper()}.png"


def test_annotations_of_no_listed_image_are_told(lila: Path) -> None:
    whole = index_of(lila)
    edit(lila, lambda content: content["annotations"].append({"image_id": "gone", "category_id": 11}))
    index = index_of(lila)
    assert index.samples == whole.samples
    assert [each.why for each in index.left_out if each.what == "1 annotations"] == [
        "of images that no annotation file lists"
    ]


def _without(key: str, part: str) -> Change:
    return lambda content: content[part][0].pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("images"), "it lacks 'images'"),
        (lambda content: content.pop("annotations"), "it lacks 'annotations'"),
        (_without("location", "images"), "it lacks 'location'"),
        (_without("file_name", "images"), "it lacks 'file_name'"),
        (_without("category_id", "annotations"), "it lacks 'category_id'"),
        (lambda content: content["annotations"][0].update(category_id=5000), "it lacks 'the category 5000'"),
        (lambda content: content.update(images=[3]), "not an annotation file of LILA"),
        (lambda content: content.update(images=None), "not an annotation file of LILA"),
        (lambda content: content["images"][0].update(frame_num="two"), "not an annotation file of LILA"),
    ],
)
def test_an_annotation_file_that_lacks_something_is_refused(lila: Path, change: Change, message: str) -> None:
    edit(lila, change)
    with pytest.raises(ms.MergestreamError, match=message) as refusal:
        index_of(lila)
    assert "train_annotations.json" in str(refusal.value)
    assert str(lila) in str(refusal.value)


@pytest.mark.parametrize("content", [b'{"images": [', b"", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_damaged_annotation_file_is_refused(lila: Path, content: bytes) -> None:
    annotations(lila, "cis_val").write_bytes(content)
    with pytest.raises(ms.MergestreamError, match=r"cis_val_annotations\.json in .* is not JSON, or is cut short"):
        index_of(lila)


def test_annotations_that_are_a_list_are_refused(lila: Path) -> None:
    annotations(lila, "train").write_text("[]")
    with pytest.raises(ms.MergestreamError, match="not an annotation file of LILA"):
        index_of(lila)


def test_domainbeds_folders_are_read_as_they_are(tree: Path) -> None:
    index = index_of(tree)
    assert index.card.domains == ("location_100", "location_38", "location_43", "location_46")
    assert index.counts() == {domain: dict.fromkeys(index.card.classes, 2) for domain in index.card.domains}
    for sample in index.samples:
        assert index.card.classes[sample.label] == Path(sample.file).parent.name
    data = ms.load_dataset("terra", root=tree, size=16)["location_43"]
    assert data.groups is None
    assert data.acquired is None


def test_a_class_that_a_location_never_shows_shifts_no_label(tree: Path) -> None:
    shutil.rmtree(tree / "location_43" / "bird")
    index = index_of(tree)
    assert index.counts()["location_43"] == {**dict.fromkeys(index.card.classes, 2), "bird": 0}
    data = ms.load_dataset("terra", root=tree, size=16)["location_43"]  # the real set may lack classes
    assert set(data.labels.tolist()) == set(range(1, 10))


def test_an_image_in_two_class_folders_is_left_out_of_both(tree: Path) -> None:
    """The same name and size in two classes are two images unless the content is the same."""
    dog, cat = (tree / "location_38" / name / "1.bmp" for name in ("dog", "cat"))
    for path, label in ((dog, 1), (cat, 2)):
        write_picture(path, picture("location_38", label, 99))
    assert dog.stat().st_size == cat.stat().st_size
    assert len(index_of(tree).samples) == 82
    shutil.copy(dog, cat)
    index = index_of(tree)
    assert len(index.samples) == 80
    assert [(each.what, each.why) for each in index.left_out] == [
        ("location_38/cat/1.bmp", "is in the folders of two classes"),
        ("location_38/dog/1.bmp", "is in the folders of two classes"),
    ]
    assert index.images_found == 82


def test_folders_win_over_annotations_beside_them(lila: Path) -> None:
    write_terra_tree(lila)
    assert len(index_of(lila).samples) == 80


def test_a_tree_without_one_location_says_so_and_names_the_other_layout(tree: Path) -> None:
    shutil.rmtree(tree / "location_46")
    with pytest.raises(ms.MergestreamError, match=r"lacks location_46.*_annotations\.json"):
        terra.read(Root(tree))


def test_lilas_table_of_all_images_is_read_as_domainbed_reads_it(lila: Path) -> None:
    """One file with what the five splits list; an image that two of them list is there once."""
    before = index_of(lila)
    whole: dict[str, dict[Any, Any]] = {"images": {}, "annotations": {}, "categories": {}}
    for split in SPLITS:
        for key, entries in content_of(lila, split).items():
            if key in whole:
                whole[key] |= {json.dumps(entry, sort_keys=True): entry for entry in entries}
        annotations(lila, split).unlink()
    table = {key: list(entries.values()) for key, entries in whole.items()}
    (lila / "caltech_images_20210113.json").write_text(json.dumps(table))
    after = index_of(lila)
    assert {(s.id, s.domain, s.label) for s in after.samples} == {(s.id, s.domain, s.label) for s in before.samples}
    assert after.missing == before.missing
