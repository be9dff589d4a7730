"""What a benchmark concludes, against naive references."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergestream.bench.analysis.bench_findings import (
    collapses,
    describe_collapses,
    rank_methods,
    subgroup_rows,
    unpredicted_classes,
)
from mergestream.bench.analysis.comparison import compare, describe_duels, duel, rows_of
from mergestream.bench.records import Run
from mergestream.bench.report.bench_tables import results_table, target_table
from mergestream.functional.intervals import difference_with_interval, mean_with_interval
from mergestream.functional.metrics import collapsed_classes, risk_coverage, summarise

CLASSES = ("a", "b", "c")


def make_run(label: str, target: str, right: list[bool], seed: int = 0, **more) -> Run:
    """A run of batches of two whose answers are right or wrong as given."""
    labels = torch.arange(len(right)) % 3
    answers = torch.where(torch.tensor(right), labels, (labels + 1) % 3)
    arguments = {
        "method": more.pop("method", label), "label": label, "seed": seed, "pool": {"fingerprint": "p", "experts": []},
        "data": {"domain": target}, "stream": {"name": "iid", "hash": f"{target}{seed}"},
    }  # fmt: skip
    batches = np.split(np.arange(len(right)), len(right) // 2)
    steps = [{"seconds": 0.01} for _ in batches]
    probabilities = torch.nn.functional.one_hot(answers, 3) * 0.7 + 0.1
    return Run.finish(arguments, CLASSES, steps, batches, labels, probabilities, **more)


def test_risk_coverage_by_hand() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    coverage, risk = risk_coverage(probabilities, torch.tensor([0, 1, 1, 0]))
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1]
    np.testing.assert_allclose(risk, [0, 1 / 2, 1 / 3, 1 / 4])
    assert summarise(probabilities, torch.tensor([0, 1, 1, 0]), ("a", "b"))["aurc"] == pytest.approx(np.mean(risk))


@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_risk_coverage_does_not_depend_on_the_order(seed: int, count: int) -> None:
    random = np.random.RandomState(seed)
    probabilities = torch.from_numpy(random.choice([0.5, 0.6, 0.7, 0.9], size=(count, 1)))
    probabilities = torch.cat([probabilities, 1 - probabilities], dim=1)
    labels, order = torch.from_numpy(random.randint(2, size=count)), torch.from_numpy(random.permutation(count))
    _, risk = risk_coverage(probabilities, labels)
    _, moved = risk_coverage(probabilities[order], labels[order])
    np.testing.assert_allclose(risk, moved)
    assert risk[-1] == pytest.approx(float((probabilities.argmax(dim=1) != labels).float().mean()))


def shares(*counts: int) -> list[int]:
    return [c for c, n in enumerate(counts) for _ in range(n)]


@pytest.mark.parametrize(
    ("experts", "answers", "lost"),
    [
        ([shares(80, 20), shares(60, 40)], shares(95, 5), ["b"]),  # 5 % is less than a fifth of 30 %
        ([shares(80, 20), shares(60, 40)], shares(94, 6), []),  # exactly a fifth is left
        ([shares(95, 5), shares(60, 40)], shares(100, 0), ["b"]),  # 5 % counts as predicted
        ([shares(96, 4), shares(60, 40)], shares(100, 0), []),  # one expert hardly predicts it
        ([shares(50, 50), shares(50, 50)], shares(0, 100), ["a"]),
    ],
)
def test_the_collapse_check_at_its_bounds(experts: list[list[int]], answers: list[int], lost: list[str]) -> None:
    lost_classes = collapsed_classes(torch.tensor(experts), torch.tensor(answers), ("a", "b"))
    assert [each["class"] for each in lost_classes] == lost
    for each in lost_classes:
        c = "ab".index(each["class"])
        assert each["share"] == pytest.approx(np.mean(np.array(answers) == c))
        assert each["experts"] == pytest.approx(np.mean(np.array(experts) == c))


def test_collapses_name_method_target_and_class_but_not_single_experts() -> None:
    experts = torch.tensor([[0, 1, 2] * 4, [2, 1, 0] * 4])
    run = make_run("mean", "lyon", [True] * 12, experts=experts)
    lost = make_run("fisher", "lyon", [c % 3 == 0 for c in range(12)], experts=experts)  # says b where it is a ...
    alone = make_run("single_expert(expert=x)", "lyon", [False] * 12, method="single_expert", experts=experts)
    assert collapses([run, alone]) == []
    assert lost.metrics["collapsed"] == collapsed_classes(experts, lost.predictions, CLASSES)
    (collapse,) = collapses([run, lost, alone])
    assert (collapse.label, collapse.target, collapse.class_name) == ("fisher", "lyon", "b")
    other = replace(collapse, target="brest", stream="sorted", share=0.02)
    (sentence,) = describe_collapses([collapse, other])
    assert sentence.startswith(
        "fisher: the class 'b' has nearly vanished at lyon, brest (iid, sorted); at worst it is 0.0 %"
    )


def test_a_class_that_no_expert_predicts_gives_a_warning() -> None:
    predicted = make_run("single_expert(expert=x)", "lyon", [True] * 12, method="single_expert")
    deaf = make_run(
        "single_expert(expert=x)", "lyon", [c % 3 != 2 and c % 3 != 1 for c in range(12)], method="single_expert"
    )
    assert unpredicted_classes([predicted]) == unpredicted_classes([]) == []
    (sentence,) = unpredicted_classes([deaf])  # it says a for a, c for b and a for c
    assert "hardly ever predict 'b': 0.0 % of their answers, 33.3 % of the labels" in sentence


def test_ranks_wins_and_losses_with_ties() -> None:
    accuracy = {"mean": {"lyon": 4, "brest": 6}, "ties": {"lyon": 4, "brest": 2}, "fisher": {"lyon": 2, "brest": 4}}
    runs = [
        make_run(label, target, [True] * n + [False] * (6 - n))
        for label, of in accuracy.items()
        for target, n in of.items()
    ]
    standings = {each.label: each for each in rank_methods(runs)}
    assert standings["mean"].mean_rank == (1.5 + 1) / 2
    assert standings["ties"].mean_rank == (1.5 + 3) / 2
    assert standings["fisher"].mean_rank == (3 + 2) / 2
    assert [(standings[name].wins, standings[name].losses) for name in accuracy] == [(3, 0), (1, 2), (1, 3)]
    partial = [*runs, make_run("mean", "graz", [True] * 6)]  # a cell that the others lack
    assert {each.label: each.mean_rank for each in rank_methods(partial)} == {
        n: e.mean_rank for n, e in standings.items()
    }


def test_a_duel_counts_targets_and_widens_across_them() -> None:
    runs = []
    for target, ours, theirs in (("lyon", 12, 10), ("brest", 10, 10), ("turin", 8, 4), ("graz", 4, 6)):
        runs += [make_run("mean", target, [True] * ours + [False] * (12 - ours))]
        runs += [make_run("ties", target, [True] * theirs + [False] * (12 - theirs))]
    (result,) = duel(runs, "mean", "ties")
    assert (result.wins, result.losses) == (2, 1)
    assert result.difference.mean == result.across_targets.mean == pytest.approx((2 + 0 + 4 - 2) / 48)
    width = result.difference.high - result.difference.low
    assert result.across_targets.high - result.across_targets.low > width


def naive_gap(ours, theirs, run: int, random: np.random.RandomState) -> float:
    batches = random.randint(len(ours[run]), size=len(ours[run]))
    return np.subtract(*(np.trace(m[run][batches].sum(0)) / m[run][batches].sum() for m in (ours, theirs)))


def test_resampling_targets_by_a_naive_loop() -> None:
    random = np.random.RandomState(3)
    ours, theirs = ([random.randint(1, 9, size=(12, 2, 2)) for _ in range(3)] for _ in range(2))
    targets = ["a", "b", "c"]
    for across in (False, True):
        mean, low, high = difference_with_interval(ours, theirs, "accuracy", targets=targets, across=across)
        drawn = []
        for _ in range(3000):
            picked = random.randint(3, size=3) if across else range(3)
            drawn.append(np.mean([naive_gap(ours, theirs, run, random) for run in picked]))
        assert (low, high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.02)
        assert low < mean < high


def test_more_seeds_of_the_same_images_do_not_narrow_an_interval() -> None:
    """Eight copies of a run say no more of its images than one; eight targets do."""
    random = np.random.RandomState(4)
    one, other = random.randint(1, 9, size=(2, 20, 2, 2))

    def width(count: int, targets: list[str]) -> float:
        _, low, high = difference_with_interval([one] * count, [other] * count, "accuracy", targets=targets)
        return high - low

    assert width(8, ["a"] * 8) == pytest.approx(width(1, ["a"]), rel=0.1)
    assert width(8, list("abcdefgh")) == pytest.approx(width(1, ["a"]) / np.sqrt(8), rel=0.2)
    _, low, high = mean_with_interval([one] * 8, "accuracy", targets=["a"] * 8)
    _, low_of_one, high_of_one = mean_with_interval([one], "accuracy")
    assert high - low == pytest.approx(high_of_one - low_of_one, rel=0.1)


def test_one_batch_has_an_interval_of_its_images() -> None:
    """A bootstrap over one batch has no width; with few batches images are drawn again inside them."""
    run = np.array([[[30, 10], [10, 30]]])  # one batch of 80 images, 60 of them right
    _, low, high = mean_with_interval([run], "accuracy")
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.75 * 0.25 / 80), rel=0.15)
    gap, low, high = difference_with_interval([run], [np.array([[[29, 11], [10, 30]]])], "accuracy")
    assert low <= 0 < gap < high  # one image of 80 proves nothing


def test_a_target_with_more_runs_counts_no_more() -> None:
    runs = [make_run("single_expert(expert=x)", "lyon", [True] * 6, method="single_expert")]
    runs += [make_run(f"single_expert(expert={n})", "brest", [False] * 6, method="single_expert") for n in "xyz"]
    rows = {row.label: row for row in rows_of(runs)}
    average, oracle = rows["single_expert, on average"], rows["oracle: best single expert"]
    assert average.accuracy.mean == pytest.approx(0.5)
    assert average.accuracy.mean == pytest.approx(np.mean(list(average.per_target.values())))
    assert average.accuracy.mean <= oracle.accuracy.mean


def test_all_that_print_alike_are_bold() -> None:
    runs = [make_run(label, "lyon", [True] * 4 + [False] * 2) for label in ("mean", "ties")]
    runs += [make_run("fisher", "lyon", [True] * 2 + [False] * 4)]
    runs += [make_run("single_expert(expert=x)", "lyon", [True] * 6, method="single_expert")]
    rows = rows_of(runs)
    for table in (results_table(rows, "accuracy", "t"), target_table(rows, "iid")):
        bold = {table.rows[r][0] for r, c in table.best if c == 1}
        assert bold == {"mean", "ties"}
        assert "expert rows excluded" in table.note


def test_a_variant_is_indented_only_right_below_its_method() -> None:
    labels = ("mean", "entropy_adaptive(head=shared)", "entropy_adaptive", "entropy_adaptive(momentum=0.9)")
    table = results_table(compare([make_run(n, "lyon", [True] * 6) for n in labels]), "accuracy", "t", compact=True)
    assert [row[0] for row in table.rows] == [
        "mean", "entropy_adaptive(head=shared)", "entropy_adaptive", "  momentum=0.9"
    ]  # fmt: skip


def test_sentences_tell_what_holds_for_other_targets_too() -> None:
    runs = []
    for target, ours in (("lyon", 12), ("brest", 12), ("turin", 11), ("graz", 12)):
        for label, n in (("mean", ours), ("ties", 2), ("fisher", ours if target == "turin" else 11)):
            runs += [make_run(label, target, ([True] * n + [False] * (12 - n)) * 20)]
    duels = [*duel(runs, "mean", "ties"), *duel(runs, "mean", "fisher")]
    (sentence,) = describe_duels(duels)
    assert re.search(r"ties \(\+\d+\.\d, across targets too\)", sentence)
    assert (duels[1].wins, duels[1].losses, duels[1].ties) == (3, 0, 1)


def test_subgroups_weigh_by_images() -> None:
    scanners = ["A"] * 4 + ["B"] * 2
    one = make_run("mean", "lyon", [True] * 4 + [False] * 2, subgroups={"scanner": scanners})
    two = make_run("mean", "brest", [False] * 6, subgroups={"scanner": ["A"] * 6})
    assert one.metrics["subgroups"]["scanner"]["A"]["accuracy"] == 1
    assert one.metrics["subgroups"]["scanner"]["B"]["accuracy"] == 0
    rows = {row.value: row for row in subgroup_rows([one, two])}
    assert rows["A"].accuracy == pytest.approx(4 / 10)
    assert (rows["A"].images, rows["B"].images) == (10, 2)


def test_rows_hold_single_experts_as_average_and_oracle() -> None:
    runs = [make_run("mean", "lyon", [True] * 6)]
    for name, n in (("x", 2), ("y", 4)):
        label = f"single_expert(expert={name})"
        runs.append(make_run(label, "lyon", [True] * n + [False] * (6 - n), method="single_expert"))
    rows = {row.label: row for row in rows_of(runs)}
    assert set(rows) == {"mean", "single_expert, on average", "oracle: best single expert"}
    assert rows["single_expert, on average"].accuracy.mean == pytest.approx(0.5)
    assert rows["oracle: best single expert"].accuracy.mean == pytest.approx(4 / 6)
    assert rows["mean"].milliseconds == pytest.approx(10)
