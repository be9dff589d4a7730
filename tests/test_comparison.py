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
from mergestream.bench.analysis.comparison import Pairing, compare, mean_draws, pairing_of, rows_of
from mergestream.bench.analysis.duels import describe_duels, describe_levels, duel
from mergestream.bench.records import Run
from mergestream.bench.report.bench_tables import results_table, target_table
from mergestream.bench.report.duel_tables import duel_tables
from mergestream.bench.report.result_table import ResultTable, in_parts
from mergestream.functional.intervals import mean_with_interval
from mergestream.functional.metrics import collapsed_classes, risk_coverage, summarise

CLASSES = ("a", "b", "c")


def make_run(label: str, target: str, right: list[bool], seed: int = 0, **more) -> Run:
    """A run of batches of two whose answers are right or wrong as given."""
    labels = torch.arange(len(right)) % 3
    answers = torch.where(torch.tensor(right), labels, (labels + 1) % 3)
    arguments = {
        "method": more.pop("method", label), "label": label, "seed": seed,
        "pool": {"fingerprint": more.pop("pool", "p"), "experts": []},
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
    assert (result.wins, result.losses, result.ties) == (2, 1, 1)
    assert result.difference.mean == result.these_targets.mean == pytest.approx((2 + 0 + 4 - 2) / 48)
    width = result.these_targets.high - result.these_targets.low
    assert result.difference.high - result.difference.low > width
    assert (result.worst.target, result.worst.difference.mean) == ("graz", pytest.approx(-2 / 12))
    assert result.levels == ("targets", "batches")
    assert describe_levels([result]) == (
        "Resampled: targets, batches. Not resampled: training seeds (one per target), stream seeds (one per pool)."
    )


def paired_runs(right: list[int], other: list[int], batches: int = 50) -> list[Run]:
    """Ours and theirs at four targets, in batches of two: of every 200 images so many are right."""
    runs = []
    for label, counts in (("ours", right), ("theirs", other)):
        for target, count in zip(("lyon", "brest", "turin", "graz"), counts, strict=True):
            answers = np.arange(200) * 77 % 200 < count  # spread over the run
            runs.append(make_run(label, target, np.tile(answers, batches)[: 2 * batches].tolist()))
    return runs


@pytest.mark.parametrize(
    ("right", "batches", "outcome"),
    [
        ([170, 170, 172, 168], 1000, "better"),
        ([160, 160, 160, 160], 1000, "not inferior"),
        ([158, 158, 158, 158], 1000, "inferior"),  # one point worse
        ([180, 140, 180, 140], 20, "undecided"),  # too few images
    ],
)
def test_verdicts_at_the_margin(right: list[int], batches: int, outcome: str) -> None:
    (result,) = duel(paired_runs(right, [160] * 4, batches), "ours", "theirs")
    assert result.outcome == outcome
    assert result.margin == 0.005
    first, second = describe_duels([result])
    phrase = {"undecided": "undecided against"}.get(outcome, f"{outcome} {'than' if outcome == 'better' else 'to'}")
    gain = 100 * result.difference.mean
    assert re.search(rf"\(\d+\.\d %; margin 0.5 points\) is {phrase} theirs \({re.escape(f'{gain:+.1f}')}\)", first)
    assert second.startswith("At the worst target on iid, ours is ")
    mean_table, worst_table, secondary, of_probabilities = duel_tables([result])
    assert mean_table.rows[0][1].endswith(outcome)
    assert bool(mean_table.best) == (outcome == "better")
    assert result.worst.outcome in worst_table.rows[0][1]
    assert secondary.columns[1:] == (
        "balanced accuracy", "balanced accuracy, worst target", "AUROC", "AUROC, worst target"
    )  # fmt: skip
    assert of_probabilities.columns[1:] == ("NLL", "Brier")
    signs = {each.metric: np.sign(each.difference.mean) for each in result.secondary}
    if outcome == "better":
        assert (signs["balanced_accuracy"], signs["nll"], signs["brier"]) == (1, -1, -1)
        assert {each.outcome for each in result.secondary} == {"better"}


def test_a_good_mean_does_not_hide_the_worst_target() -> None:
    (result,) = duel(paired_runs([190, 190, 190, 130], [160] * 4, 1000), "ours", "theirs")
    assert result.difference.mean > 0
    assert (result.worst.outcome, result.worst.target) == ("inferior", "graz")
    sentence = "At the worst target on iid, ours is inferior to theirs (-15.0 at graz)."
    assert describe_duels([result])[1] == sentence


def test_stream_seeds_are_told_apart_from_training_seeds() -> None:
    runs = [
        make_run(label, "lyon", [True] * n + [False] * (24 - n), seed=seed, pool=pool)
        for label, n in (("mean", 20), ("ties", 10))
        for pool, seed in (("p", 0), ("p", 1), ("q", 0))
    ]
    assert [pairing_of(run) for run in runs[:3]] == [
        Pairing("lyon", "p", 0),
        Pairing("lyon", "p", 1),
        Pairing("lyon", "q", 0),
    ]
    (result,) = duel(runs, "mean", "ties")
    assert result.wins == 3
    assert result.levels == ("training seeds", "stream seeds", "batches")


def test_more_seeds_of_the_same_images_do_not_narrow_an_interval() -> None:
    """Eight copies of a run say no more of its images than one."""
    one = np.random.RandomState(4).randint(1, 9, size=(20, 2, 2))
    _, low, high = mean_with_interval([one] * 8, "accuracy", targets=["a"] * 8)
    _, low_of_one, high_of_one = mean_with_interval([one], "accuracy")
    assert high - low == pytest.approx(high_of_one - low_of_one, rel=0.1)


def test_one_batch_has_an_interval_of_its_images() -> None:
    """A bootstrap over one batch has no width; with few batches images are drawn again inside them."""
    run = np.array([[[30, 10], [10, 30]]])  # one batch of 80 images, 60 of them right
    _, low, high = mean_with_interval([run], "accuracy")
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.75 * 0.25 / 80), rel=0.15)
    (result,) = duel(
        [replace(make_run(label, "lyon", [True] * n + [False] * (80 - n)), batches=(np.arange(80),))
         for label, n in (("mean", 60), ("ties", 59))], "mean", "ties"
    )  # fmt: skip
    gap = result.difference
    assert gap.low <= 0 < gap.mean < gap.high  # one image of 80 proves nothing


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


def test_a_wide_table_comes_in_parts_that_hold_every_column_once() -> None:
    streams = tuple(f"stream {n}" for n in range(7))
    rows = tuple((name, *(f"{n}.{r} [10.0, 20.0]" for n in range(7))) for r, name in enumerate(("mean", "ties")))
    table = ResultTable("t", ("method", *streams), rows, frozenset({(0, 2), (1, 7)}), "note")
    assert in_parts(table, 500) == [table]
    parts = in_parts(table, 70)
    assert [part.title for part in parts] == ["t, part 1 of 3", "t, part 2 of 3", "t, part 3 of 3"]
    assert tuple(column for part in parts for column in part.columns[1:]) == streams
    bold = {
        (row[0], row[c]) for part in parts for r, row in enumerate(part.rows) for c in range(8) if (r, c) in part.best
    }
    assert bold == {("mean", "1.0 [10.0, 20.0]"), ("ties", "6.1 [10.0, 20.0]")}
    assert len(in_parts(table, 1)) == 7  # never without a column


def test_a_variant_is_indented_only_right_below_its_method() -> None:
    labels = ("mean", "entropy_adaptive(head=shared)", "entropy_adaptive", "entropy_adaptive(momentum=0.9)")
    table = results_table(compare([make_run(n, "lyon", [True] * 6) for n in labels]), "accuracy", "t", compact=True)
    assert [row[0] for row in table.rows] == [
        "mean", "entropy_adaptive(head=shared)", "entropy_adaptive", "  momentum=0.9"
    ]  # fmt: skip


def test_sentences_name_every_rival_by_its_verdict() -> None:
    runs = []
    for target, ours in (("lyon", 12), ("brest", 12), ("turin", 11), ("graz", 12)):
        for label, n in (("mean", ours), ("ties", 2), ("fisher", ours if target == "turin" else 11)):
            runs += [make_run(label, target, ([True] * n + [False] * (12 - n)) * 20)]
    duels = [*duel(runs, "mean", "ties"), *duel(runs, "mean", "fisher"), *duel(runs, "mean", "mean")]
    first, second = describe_duels(duels)
    assert re.search(r"is better than ties \(\+\d+\.\d\), fisher \(.*\); not inferior to mean \(\+0\.0\)\.", first)
    assert "not inferior to fisher (+0.0 at turin), mean (+0.0 at lyon)" in second
    assert (duels[1].wins, duels[1].losses, duels[1].ties) == (3, 0, 1)


def test_streams_of_a_part_of_the_images_have_draws_of_their_own() -> None:
    runs = []
    for label in ("mean", "ties"):
        for name, count in (("iid", 24), ("prevalence:0.1", 18)):
            run = make_run(label, "lyon", [True] * 10 + [False] * (count - 10))
            arguments = {**run.arguments, "data": {"dataset": "d", "domain": "lyon"}, "stream": {"name": name}}
            runs.append(replace(run, arguments=arguments))
    draws = mean_draws({(run.label, run.stream): [run] for run in runs}, ("accuracy",), 50)
    assert (draws["mean", "prevalence:0.1"]["accuracy"] == draws["ties", "prevalence:0.1"]["accuracy"]).all()
    assert draws["mean", "iid"]["accuracy"].mean() == pytest.approx(10 / 24, abs=0.06)
    assert draws["mean", "prevalence:0.1"]["accuracy"].mean() == pytest.approx(10 / 18, abs=0.06)


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
