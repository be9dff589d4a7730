"""Streams: every sample once, reproducible, and as skewed as the paper says; and streams of real life."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mergestream.data import streams
from mergestream.runtime.errors import InputError, MergestreamError

DOCS = Path(__file__).parent.parent / "docs"
# Class counts of PACS's four domains (protocol: 9,991 images), for the realised majority share.
PACS = {
    "art_painting": (379, 255, 285, 184, 201, 295, 449),
    "cartoon": (389, 457, 346, 135, 324, 288, 405),
    "photo": (189, 202, 182, 186, 199, 280, 432),
    "sketch": (772, 740, 753, 608, 816, 80, 160),
}
SPECS = ["iid", "dirichlet:0.05", "dirichlet:0.5", "dirichlet:0.0001", "note:0.1", "note:0.01", "sorted", "temporal"]
SPECS += ["mixture:smooth", "mixture:abrupt", "slides", "recurrence"]
# Of the rest of the table, in every combination that the grammar has; these may leave images out.
SUBSETS = ["prevalence:0.3", "prevalence:0.3:0", "missing:1", "missing:0:2", "missing:1+prevalence:0.4"]
PARTIAL = [*SUBSETS, "prevalence:0.3+dirichlet:0.05", "missing:1+recurrence", "lone", "lone:0", "prevalence:0.4+lone"]
NAMES = ("a", "b", "c", "d", "e")


def make(spec: str, labels: list[int], batch_size: int = 8, seed: int = 0) -> streams.Stream:
    domains = [i % 3 for i in range(len(labels))]
    columns = {"acquired": [-i for i in range(len(labels))], "groups": [f"slide {i % 7}" for i in range(len(labels))]}
    columns["domains"] = domains if len(labels) > 2 else [0, 1]
    return streams.create_stream(spec, labels, batch_size=batch_size, seed=seed, **columns)


@pytest.mark.parametrize("spec", SPECS)
@given(
    labels=st.lists(st.integers(0, 4), min_size=4, max_size=60), batch_size=st.integers(1, 70), seed=st.integers(0, 99)
)
def test_every_sample_exactly_once(spec: str, labels: list[int], batch_size: int, seed: int) -> None:
    stream = make(spec, labels, batch_size, seed)
    assert sorted(np.concatenate(list(stream)).tolist()) == list(range(len(labels)))
    assert all(len(batch) == batch_size for batch in stream[:-1])
    assert stream.hash == make(spec, labels, batch_size, seed).hash
    assert stream.name == spec


@pytest.mark.parametrize(
    "spec", [s for s in [*SPECS, *PARTIAL, "long:20"] if s not in ("temporal", "slides", "missing:0:2")]
)
def test_another_seed_is_another_order(spec: str) -> None:
    labels = [i % 4 for i in range(100)]
    assert make(spec, labels, seed=0).hash != make(spec, labels, seed=1).hash


def test_hashes_are_pinned() -> None:
    """A stream is part of a run's name: these must hold across numpy versions and machines."""
    labels = [i % 4 for i in range(100)]
    pinned = {
        "iid": "5f5239eca0a2",
        "dirichlet:0.05": "e9d5e884a7fc",
        "note:0.1": "8134bab6d33c",
        "sorted": "d431d2dd9bf4",
        "mixture:abrupt": "f328fba45c32",
        "slides": "4fd1063b27e0",
        "recurrence": "19a1e75e4f37",
        "lone": "dcfd62d703a7",
        "prevalence:0.1": "915c2c5e380d",
        "missing:2": "38ee2a9127d5",
        "missing:0:2": "f1af3a071838",
        "long:30": "ab2788fc9895",
        "prevalence:0.1:1+dirichlet:0.05+long:30": "5ea0c6926788",
    }
    assert {spec: make(spec, labels).hash[:12] for spec in pinned} == pinned


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("dirichlet:0.05", "With our code {} of 32 are from one class on PACS (mean of four domains, five seeds)"),
        ("dirichlet:0.5", "(mean of four domains, five seeds), {} at 0.5"),
        ("note:0.1", "It gives {} of 32"),
    ],
)
def test_the_docs_give_the_majority_on_pacs(spec: str, sentence: str) -> None:
    """The mean count of a batch's commonest class, over whole batches of 32."""
    counts = []
    for domain, seed in product(PACS.values(), range(5)):
        labels = np.repeat(np.arange(7), domain)
        stream = streams.create_stream(spec, labels, batch_size=32, seed=seed)
        counts.append(np.mean([np.bincount(labels[batch]).max() for batch in stream if len(batch) == 32]))
    assert sentence.format(f"{np.mean(counts):.1f}") in (DOCS / "streams.md").read_text(encoding="utf-8")
    if spec == "dirichlet:0.05":
        assert f"our per-batch form gives {np.mean(counts):.1f}." in (DOCS / "paper.md").read_text(encoding="utf-8")


def test_sorted_ascends_and_shuffles_inside_a_class() -> None:
    labels = np.array([2, 0, 1] * 20)
    order = np.concatenate(list(streams.sorted_by_label(labels)))
    assert (np.diff(labels[order]) >= 0).all()
    assert (np.diff(order[:20]) < 0).any()


def test_note_is_contiguous_by_class_inside_chunks() -> None:
    labels = np.repeat(np.arange(5), 60)
    order = labels[np.concatenate(list(streams.note(labels, delta=0.1, seed=3)))]
    changes = int((np.diff(order) != 0).sum())
    assert changes <= 5 * 5  # at most C runs in each of C chunks; a shuffle has about 240


def test_temporal_follows_acquisition_and_is_refused_without_it() -> None:
    stream = streams.temporal([0, 1, 0], acquired=["20060523", "20051019", "20051020"], batch_size=2)
    assert [batch.tolist() for batch in stream] == [[1, 2], [0]]
    with pytest.raises(MergestreamError, match=r"note:0\.1"):
        streams.create_stream("temporal", [0, 1])


@pytest.mark.parametrize("change", ["smooth", "abrupt"])
def test_mixture_shares_change_over_time(change: str) -> None:
    domains = np.array([0] * 400 + [1] * 400)
    stream = streams.mixture(np.zeros(800, int), domains=domains, change=change, seed=1)
    shares = np.array([(domains[batch] == 0).mean() for batch in stream])
    assert shares.max() > 0.8
    assert shares.min() < 0.2
    jumps = np.abs(np.diff(shares))
    if change == "abrupt":
        assert jumps.max() > 0.5
        assert np.median(jumps) < 0.15


@pytest.mark.parametrize(
    ("spec", "labels", "message"),
    [
        ("dirichlett:0.1", [0, 1], "Did you mean 'dirichlet'"),
        ("dirichlet", [0, 1], "dirichlet:0.05"),
        ("dirichlet:much", [0, 1], "not a number"),
        ("dirichlet:0", [0, 1], "'alpha' is a finite number of at least 1e-06"),
        ("note:-1", [0, 1], "'delta' is a finite number of at least 1e-06"),
        ("iid:3", [0, 1], "takes no value"),
        ("iid", [], "non-empty"),
        ("iid", [[0, 1]], "non-empty list"),
        ("iid", [0.5, 1.0], "whole numbers"),
        ("iid", [-1, 1], "whole numbers"),
        ("mixture:smoot", [0, 1], "Did you mean 'smooth'"),
        ("prevalence", [0, 1], "prevalence:0.05"),
        ("prevalence:", [0, 1], "prevalence:0.05"),
        ("prevalence:0", [0, 1], "'share' is a finite number above 0 and below 1"),
        ("prevalence:1", [0, 1], "above 0 and below 1"),
        ("prevalence:nan", [0, 1], "above 0 and below 1"),
        ("prevalence:half", [0, 1], "not a number"),
        ("prevalence:0.5:1:1", [0, 1], "at most 2 values"),
        ("prevalence:0.5:cat", [0, 1], "give its number"),
        ("prevalence:0.5", [1, 1], "2 images of the class and 0 others"),
        ("prevalence:0.5:2", [0, 1], "0 images of the class and 2 others"),
        ("prevalence:0.01", [0, 1, 1], "cannot be reached"),
        ("missing", [0, 1], "missing:2"),
        ("missing:0", [0, 1], "'missing' is a whole number of at least 1"),
        ("missing:2", [0, 1], "no image is left"),
        ("missing:1", [1, 1], "no image is left"),
        ("missing:0:0", [0, 1], "names a class twice"),
        ("missing:cat:0", [0, 1], "give its number"),
        ("lone", [1, 1], "images of the class and others"),
        ("lone:2", [0, 1], "here are 0 and 2"),
        ("long", [0, 1], "long:100000"),
        ("long:0", [0, 1], "'long' is a whole number of at least 1"),
        ("long:1.5", [0, 1], "'long' is a whole number of at least 1"),
        ("long:100000000", [0, 1], "at most 10000000 batches"),
        ("slides", [0, 1], "name no slides or patients"),
        ("slides:3", [0, 1], "takes no value"),
        ("recurrence:3:4", [0, 1], "takes one value"),
        ("recurrence:rome", [0, 1], "domain in this target called 'rome'"),
        ("recurrence", [0, 1], "one image only"),
        ("iid+prevalence:0.5", [0, 1], "subsets, then one order"),
        ("iid+sorted", [0, 1], "subsets, then one order"),
        ("long:3+iid", [0, 1], "subsets, then one order"),
        ("long:3+long:4", [0, 1], "subsets, then one order"),
        ("prevalence:0.5+", [0, 1], "no stream called ''"),
    ],
)
def test_bad_streams_are_refused(spec: str, labels: list, message: str) -> None:
    with pytest.raises(MergestreamError, match=message):
        streams.create_stream(spec, labels, domains=[0, 1])


def test_other_bad_input() -> None:
    with pytest.raises(MergestreamError, match="'batch_size' is a whole number of at least 1"):
        streams.iid([0, 1], batch_size=0)
    with pytest.raises(MergestreamError, match="two or more target domains"):
        streams.create_stream("mixture:smooth", [0, 1])
    with pytest.raises(MergestreamError, match="at least two domains"):
        streams.mixture([0, 1], domains=[0, 0])
    with pytest.raises(MergestreamError, match="acquisition times"):
        streams.temporal([0, 1], acquired=[1])


def test_classes_are_named_or_numbered() -> None:
    labels = [0, 1, 2, 2, 1, 0]
    named = {
        "prevalence:0.3:b": "prevalence:0.3:b",
        "prevalence:0.3:1": "prevalence:0.3:b",
        "prevalence:0.30:c": "prevalence:0.3",
        "prevalence:0.3+iid": "prevalence:0.3",
        "missing:a:1": "missing:a:b",
        "missing:01": "missing:1",
        "lone:1": "lone:b",
        "note+long:3": "note:0.1+long:3",
        "iid+long:3": "long:3",
    }
    made = {spec: streams.create_stream(spec, labels, batch_size=2, classes=("a", "b", "c")) for spec in named}
    assert {spec: stream.name for spec, stream in made.items()} == named
    assert made["lone:1"].lone == 1
    assert {labels[i] for i in np.concatenate(list(made["missing:a:1"]))} == {2}
    for spec in ("prevalence:0.5:d", "lone:3", "missing:a:d"):
        with pytest.raises(MergestreamError, match="no class called"):
            streams.create_stream(spec, labels, classes=("a", "b", "c"))


some_labels = st.lists(st.integers(0, 4), min_size=4, max_size=60)


@pytest.mark.parametrize("spec", PARTIAL)
@given(labels=some_labels, batch_size=st.integers(1, 70), seed=st.integers(0, 99))
def test_no_sample_twice_where_some_are_left_out(spec: str, labels: list[int], batch_size: int, seed: int) -> None:
    try:
        stream = make(spec, labels, batch_size, seed)
    except InputError:
        return assume(False)
    order = np.concatenate(list(stream))
    assert len(set(order.tolist())) == len(order) > 0
    assert order.dtype == np.int64
    assert order.min() >= 0
    assert order.max() < len(labels)
    assert all(len(batch) == batch_size for batch in stream[:-1])
    assert stream.hash == make(spec, labels, batch_size, seed).hash
    assert stream.name == spec
    return None


@given(labels=some_labels, share=st.floats(0.02, 0.98), positive=st.integers(0, 4), seed=st.integers(0, 99))
def test_prevalence_has_the_share_within_one_image(labels: list[int], share: float, positive: int, seed: int) -> None:
    try:
        chosen = streams.prevalence(labels, share=share, positive=positive, seed=seed)
    except InputError:
        return assume(False)
    before, after = (np.bincount(np.array(values), minlength=5) for values in (labels, np.array(labels)[chosen]))
    assert abs(after[positive] - share * len(chosen)) <= 0.5
    others, had = np.delete(after, positive), np.delete(before, positive)
    assert (abs(others - had * others.sum() / had.sum()) < 1).all()  # the others' proportions
    assert after[positive] == before[positive] or others.sum() == had.sum()  # as many as possible
    assert (np.diff(chosen) > 0).all()
    return None


def test_a_smaller_share_keeps_some_of_the_positives_of_a_larger_one() -> None:
    labels = np.repeat([0, 1], [500, 400])
    small, large = (
        {i for i in streams.prevalence(labels, share=share, seed=3) if labels[i] == 1} for share in (0.02, 0.2)
    )
    assert small < large


@given(labels=some_labels, count=st.integers(1, 4), seed=st.integers(0, 99))
def test_missing_classes_never_occur_and_the_others_all_do(labels: list[int], count: int, seed: int) -> None:
    assume(count < len(set(labels)))
    left = [labels[i] for i in np.concatenate(list(make(f"missing:{count}", labels, 3, seed)))]
    assert len(set(left)) == len(set(labels)) - count
    assert all(left.count(c) == labels.count(c) for c in set(left))


@given(labels=some_labels, batch_size=st.integers(1, 70), seed=st.integers(0, 99))
def test_lone_positives_have_a_batch_each(labels: list[int], batch_size: int, seed: int) -> None:
    assume(len(set(labels)) > 1)
    stream = make("lone", labels, batch_size, seed)
    rare = stream.lone
    assert labels.count(rare) == min(labels.count(c) for c in set(labels))
    per_batch = [sum(labels[i] == rare for i in batch) for batch in stream]
    assert set(per_batch) <= {0, 1}
    others = len(labels) - labels.count(rare)
    assert sum(map(len, stream)) - sum(per_batch) == others  # all of them
    room = others if batch_size == 1 else -(-others // (batch_size - 1))
    assert sum(per_batch) == (labels.count(rare) if batch_size == 1 else min(labels.count(rare), room))


def test_slides_come_one_after_the_other_in_the_datas_order() -> None:
    groups = ["z", "a", "z", "b", "a"]
    stream = streams.slides([0] * 5, groups=groups, batch_size=2)
    assert [batch.tolist() for batch in stream] == [[0, 2], [1, 4], [3]]
    chosen = streams.create_stream("missing:0:5", [0, 1, 1, 1, 1], groups=groups, batch_size=9)
    assert sorted(chosen[0].tolist()) == [1, 2, 3, 4]
    assert streams.create_stream("missing:0:5+slides", [0, 1, 1, 1, 1], groups=groups)[0].tolist() == [1, 4, 2, 3]
    with pytest.raises(MergestreamError, match="2 labels but 1 groups"):
        streams.slides([0, 1], groups=["a"])


def test_a_domain_comes_back() -> None:
    domains = ["x"] * 7 + ["y"] * 4
    for spec, expected in (("recurrence", "xxxxyyyyxxx"), ("recurrence:y", "yyxxxxxxxyy")):
        stream = streams.create_stream(spec, [0] * 11, domains=domains, batch_size=4, seed=1)
        assert "".join(domains[i] for i in np.concatenate(list(stream))) == expected


@given(labels=some_labels, steps=st.integers(1, 40), batch_size=st.integers(1, 70), seed=st.integers(0, 99))
def test_a_long_stream_repeats_whole_epochs(labels: list[int], steps: int, batch_size: int, seed: int) -> None:
    stream, plain = (make(spec, labels, batch_size, seed) for spec in (f"long:{steps}", "iid"))
    assert len(stream) == steps
    assert stream.repeats
    assert not plain.repeats
    for one, other in zip(stream, plain, strict=False):
        assert (one == other).all()  # it begins like the plain stream
    per_epoch = len(plain)
    for start in range(0, steps - per_epoch + 1, per_epoch):
        epoch = np.concatenate(stream[start : start + per_epoch])
        assert sorted(epoch.tolist()) == list(range(len(labels)))


def test_epochs_of_a_long_stream_differ() -> None:
    stream = make("dirichlet:0.05+long:40", [i % 4 for i in range(80)])
    epochs = [tuple(np.concatenate(stream[start : start + 10])) for start in range(0, 40, 10)]
    assert len(set(epochs)) == 4


def test_every_stream_is_in_the_table_of_the_documents() -> None:
    page = (Path(__file__).parents[1] / "docs" / "streams.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1].split(":")[0].split("[")[0] for line in page.splitlines() if line.startswith("| `")]
    assert [name for name in streams.STREAMS if name not in rows] == []


def test_labels_may_be_a_tensor() -> None:
    assert streams.iid(torch.tensor([0, 1, 2, 0])).hash == streams.iid([0, 1, 2, 0]).hash
