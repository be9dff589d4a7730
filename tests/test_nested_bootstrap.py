"""The hierarchical bootstrap against naive loops and a known truth; verdicts, p-values and Holm by hand."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from mergestream.functional.metrics import summarise
from mergestream.functional.nested_bootstrap import NestedRun, hierarchical_difference
from mergestream.functional.non_inferiority import adjusted_outcomes, gain_p_values, holm, outcome_of

METRICS = ("accuracy", "balanced_accuracy", "auroc", "nll", "brier")


def some_run(seed: int, classes: int = 3, images: int = 60, target: str = "a", **more) -> NestedRun:
    """Random answers in batches of four, with few distinct values so that there are ties."""
    random = np.random.RandomState(seed)
    labels = random.randint(classes, size=images)
    logits = random.randint(-2, 3, size=(images, classes)) + 1.5 * np.eye(classes)[labels]
    answers = torch.softmax(torch.from_numpy(logits).float(), dim=-1).numpy()
    fields = {"training_seed": "p", "stream_seed": 0, "units": np.arange(images) // 4, **more}
    return NestedRun(target, labels=labels, predictions=answers.argmax(1), probabilities=answers, **fields)


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_are_those_of_the_run(classes: int) -> None:
    run = some_run(0, classes)
    report = summarise(torch.from_numpy(run.probabilities), torch.from_numpy(run.labels), "abcd"[:classes])
    for metric in METRICS:
        assert run.scores(metric)[0] == pytest.approx(report[metric], abs=1e-5), metric
    with pytest.raises(ValueError, match="aurc"):
        run.scores("aurc")


def exact_scores(run: NestedRun, picked: np.ndarray) -> dict[str, float]:
    labels, answers = run.labels[picked], run.probabilities[picked]
    return {
        "accuracy": sk.accuracy_score(labels, answers.argmax(1)),
        "balanced_accuracy": sk.balanced_accuracy_score(labels, answers.argmax(1)),
        "auroc": sk.roc_auc_score(np.eye(answers.shape[1])[labels], answers, average="macro"),
        "nll": float(-np.mean(np.log(answers[np.arange(len(labels)), labels]))),
    }


def test_draws_of_batches_are_scores_of_repeated_batches() -> None:
    """AUROC is drawn to first order: its interval is close to that of whole images drawn again and scored anew."""
    run, random = some_run(1, images=400), np.random.RandomState(5)
    members = [np.flatnonzero(run.units == unit) for unit in range(100)]
    exact = [exact_scores(run, np.concatenate([members[u] for u in random.randint(100, size=100)])) for _ in range(300)]
    for metric in exact[0]:
        expected, drawn = [each[metric] for each in exact], run.scores(metric)[1:]
        assert drawn.std() == pytest.approx(np.std(expected), rel=0.15), metric
        assert drawn.mean() == pytest.approx(np.mean(expected), abs=0.1 * np.std(expected) + 0.002), metric


def test_a_missing_class_leaves_auroc_undefined_and_the_rest_defined() -> None:
    one_class = some_run(2)
    one_class.labels[:] = 1
    assert hierarchical_difference([one_class], [one_class], "auroc") is None
    rare = some_run(3, classes=2)  # many draws lack its only positive image
    rare.labels[:] = 0
    rare.labels[7] = 1
    result = hierarchical_difference([rare], [some_like(rare, 4)], "auroc")
    assert result is not None
    assert np.isfinite(result.mean_draws).all()


def some_like(run: NestedRun, seed: int) -> NestedRun:
    """Other answers to the same images."""
    other = some_run(seed, run.probabilities.shape[1], len(run.labels), run.target, units=run.units, unit=run.unit)
    other.labels[:] = run.labels
    return other


def test_one_unit_draw_serves_all_runs_of_a_target() -> None:
    """Copies of a run, as other pools or streams of the same images, do not narrow the interval."""
    for unit in ("batch", "group"):
        mine, other = some_run(6, images=160, unit=unit), some_run(7, images=160, unit=unit)
        widths = []
        for copies in (1, 6):
            seeds = [{"stream_seed": n, "training_seed": f"p{n % 2}"} for n in range(copies)]
            pairs = [[NestedRun(**{**fields_of(run), **seed}) for seed in seeds] for run in (mine, other)]
            low, high = hierarchical_difference(*pairs, "accuracy").interval
            widths.append(high - low)
        assert widths[1] == pytest.approx(widths[0], rel=0.02)


def test_long_streams_are_resampled_in_blocks() -> None:
    mine, other = (some_run(seed, images=12000, units=np.arange(12000)) for seed in (8, 9))
    short = [NestedRun(**{**fields_of(run), "units": np.arange(12000) // 12}) for run in (mine, other)]
    assert hierarchical_difference([mine], [other], "auroc").interval == pytest.approx(
        hierarchical_difference(short[:1], short[1:], "auroc").interval
    )


def fields_of(run: NestedRun) -> dict:
    return {name: value for name, value in vars(run).items() if name != "_drawn"}


def test_levels_with_one_element_are_not_resampled() -> None:
    def levels(*places: tuple[str, str, int], unit: str = "batch") -> tuple[str, ...]:
        runs = [some_run(0, target=t, training_seed=p, stream_seed=s, unit=unit) for t, p, s in places]
        return hierarchical_difference(runs, runs, "accuracy").levels

    assert levels(("a", "p", 0)) == ("batches",)
    assert levels(("a", "p", 0), ("b", "p", 0)) == ("targets", "batches")
    assert levels(("a", "p", 0), ("a", "q", 1)) == ("training seeds", "batches")  # seeds that go together: one level
    assert levels(("a", "p", 0), ("a", "p", 1), unit="group") == ("stream seeds", "groups")


def constant_run(gap: float, target: str, pool: str, stream: int) -> list[NestedRun]:
    """Ours and theirs: 20 equal batches of 100 images; ours has `gap` more right answers in each."""
    labels = np.zeros(2000, dtype=int)
    pair = []
    for right in (50 + round(100 * gap), 50):
        wrong = np.tile(np.arange(100) >= right, 20).astype(int)
        fields = {"labels": labels, "predictions": wrong, "probabilities": np.eye(2)[wrong].astype(np.float32)}
        pair.append(NestedRun(target, pool, stream, **fields, units=np.repeat(np.arange(20), 100)))
    return pair


def test_resampling_by_a_naive_loop() -> None:
    """Batches are all alike, so that the draws are those of targets, pools and streams: unequal numbers of each."""
    tree = {
        "a": {"p": [0.10, 0.02], "q": [0.30]},
        "b": {"p": [-0.10, 0.05, 0.12], "q": [0.04], "r": [0.20]},
        "c": {"p": [0.01]},
    }
    pairs = [
        constant_run(gap, target, pool, stream)
        for target, pools in tree.items()
        for pool, gaps in pools.items()
        for stream, gap in enumerate(gaps)
    ]
    result = hierarchical_difference(*zip(*pairs, strict=True), "accuracy", resamples=4000)
    random, names = np.random.RandomState(9), list(tree)

    def drawn_target(name: str) -> float:
        pools = list(tree[name].values())
        picked = [pools[random.randint(len(pools))] for _ in pools]
        return np.mean([np.mean([gaps[random.randint(len(gaps))] for _ in gaps]) for gaps in picked])

    means = [np.mean([drawn_target(names[random.randint(3)]) for _ in range(3)]) for _ in range(4000)]
    every = np.array([[drawn_target(name) for name in names] for _ in range(4000)])
    for drawn, expected in (
        (result.mean_draws, means),
        (result.fixed_draws, every.mean(axis=1)),
        (result.worst_draws, every.min(axis=1)),
    ):
        assert np.quantile(drawn, [0.025, 0.5, 0.975]) == pytest.approx(
            np.quantile(expected, [0.025, 0.5, 0.975]), abs=0.006
        )
    assert result.by_target == pytest.approx({"a": 0.18, "b": (0.07 / 3 + 0.04 + 0.20) / 3, "c": 0.01})
    assert result.mean == pytest.approx(np.mean(list(result.by_target.values())))
    flipped = hierarchical_difference(*zip(*pairs, strict=True), "accuracy", lower_is_better=True)
    assert flipped.worst_draws.mean() > result.worst_draws.mean()


IMAGES, BATCH = 400, 20


def simulated(random: np.random.RandomState, targets: int, gain: float) -> list[list[NestedRun]]:
    """Pairs of runs whose true gain varies over targets, pools, streams and batches about its mean.

    All runs of a target have its images, easy and hard ones, in an order of their own.
    """
    pairs = []
    for target in range(targets):
        hardness, of_target = random.uniform(size=(2, IMAGES)), gain + 0.06 * random.normal()
        for pool in range(2):
            of_pool = of_target + 0.03 * random.normal()
            for stream in range(2):
                of_stream = of_pool + 0.02 * random.normal()
                chance = np.repeat(0.5 + of_stream + 0.03 * random.normal(size=IMAGES // BATCH), BATCH)
                order = random.permutation(IMAGES)
                answers = (hardness[0][order] > chance).astype(int), (hardness[1][order] > 0.5).astype(int)
                pairs.append([answered(each, f"t{target}", f"p{pool}", stream) for each in answers])
    return pairs


def answered(answers: np.ndarray, target: str, pool: str, stream: int) -> NestedRun:
    """A run in which 0 is right."""
    fields = {"labels": np.zeros(IMAGES, dtype=int), "predictions": answers, "probabilities": np.eye(2)[answers]}
    return NestedRun(target, pool, stream, **fields, units=np.arange(IMAGES) // BATCH)


def flat_interval(random: np.random.RandomState, pairs: Sequence[Sequence[NestedRun]]) -> np.ndarray:
    """Of a bootstrap that takes the batches of all runs for independent."""
    gaps = np.concatenate([other.predictions - mine.predictions for mine, other in pairs])
    gaps = gaps.reshape(-1, BATCH).mean(axis=1)
    return np.quantile(gaps[random.randint(len(gaps), size=(300, len(gaps)))].mean(axis=1), [0.025, 0.975])


def coverage(targets: int, rounds: int = 200, gain: float = 0.02) -> tuple[float, float]:
    """How often the hierarchical and the flat interval hold the true gain."""
    random, hits = np.random.RandomState(0), np.zeros(2)
    for _ in range(rounds):
        pairs = simulated(random, targets, gain)
        nested = hierarchical_difference(*zip(*pairs, strict=True), "accuracy", resamples=300).interval
        hits += [low <= gain <= high for low, high in (nested, flat_interval(random, pairs))]
    return tuple(hits / rounds)


def test_the_interval_covers_a_known_truth_and_a_flat_one_does_not() -> None:
    nested, flat = coverage(targets=8)
    assert 0.88 <= nested <= 0.99
    assert flat < 0.7


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (0.001, 0.02, "better"),
        (0.0, 0.0, "not inferior"),
        (-0.004, 0.003, "not inferior"),
        (-0.004, -0.001, "not inferior"),  # a little worse, but by less than the margin
        (-0.005, 0.003, "undecided"),
        (-0.012, -0.001, "inferior"),
        (-0.1, 0.1, "undecided"),
    ],
)
def test_outcomes_at_their_bounds(low: float, high: float, outcome: str) -> None:
    assert outcome_of(low, high, 0.005) == outcome


def naive_holm(values: Sequence[float]) -> list[float]:
    """Smallest first: m times the smallest, m - 1 times the next, never below the one before, at most 1."""
    adjusted, highest = {}, 0.0
    for step, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (len(values) - step) * values[index]))
        adjusted[index] = highest
    return [adjusted[index] for index in range(len(values))]


def test_holm_by_hand_and_by_a_naive_loop() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0]
    assert holm([]).tolist() == []
    random = np.random.RandomState(0)
    for count in (1, 3, 10):
        values = random.uniform(size=count).round(1).tolist()  # with ties
        assert holm(values).tolist() == pytest.approx(naive_holm(values))


def test_p_values_count_draws_and_a_larger_family_decides_less() -> None:
    draws = np.linspace(-0.01, 0.99, 101)  # two of 101 are not above 0, one is at -0.01
    assert gain_p_values(draws, 0.005) == pytest.approx((3 / 102, 2 / 102, 101 / 102))
    clear, weak = (0.001, 0.001, 1.0), (0.02, 0.001, 1.0)
    assert adjusted_outcomes([weak]) == ["better"]
    assert adjusted_outcomes([clear, weak, weak]) == ["better", "not inferior", "not inferior"]
    assert adjusted_outcomes([(1.0, 1.0, 0.001), (0.9, 0.6, 0.2)]) == ["inferior", "undecided"]
    assert adjusted_outcomes([]) == []
