"""What happened over a stream: closed forms, planted changes, noise, streams without labels, figures."""

from functools import partial

import numpy as np
import pytest
import torch

from mergestream.bench.analysis.traces import SHORTEST, best_split, change_points, trace_of, unsmoothed
from mergestream.bench.records import Run
from mergestream.bench.report.figures import colours_of, new_figure
from mergestream.bench.report.method_figures import (
    draw_accuracy_over_time,
    draw_coefficients_over_time,
    draw_entropies,
)
from mergestream.runtime.errors import InputError

EXPERTS = ("brest", "lyon", "turin")
COLOURS = colours_of(EXPERTS)


def make_run(entropy: np.ndarray | None, *, labels: list[int] | None = None, size: int = 2, **options) -> Run:
    """Batches of `size` images, all answered 0; coefficients follow the entropies by Eq. 4."""
    count = 12 if entropy is None else len(entropy)
    steps = []
    for t in range(count):
        step = dict.fromkeys(("encoder_coefficients", "head_coefficients", "entropy", "consistency"))
        if entropy is not None:
            inverse = 1 / entropy[t]
            step["encoder_coefficients"] = step["head_coefficients"] = (inverse / inverse.sum()).tolist()
            step["entropy"], step["consistency"] = entropy[t].tolist(), [0.9] * len(EXPERTS)
            step["head_expert"] = EXPERTS[int(entropy[t].argmin())]
        steps.append(step)
    arguments = {
        "method": "entropy_adaptive", "label": "entropy_adaptive", "options": options, "seed": 0,
        "pool": {"fingerprint": "p", "experts": list(EXPERTS)}, "data": {"domain": "graz"},
        "stream": {"name": "iid", "hash": "h"},
    }  # fmt: skip
    batches = tuple(np.split(np.arange(size * count), count))
    truth = torch.tensor([0] * size * count if labels is None else labels)
    answers = torch.zeros(size * count, dtype=torch.long)
    return Run(arguments, ("a", "b"), steps, batches, truth, answers, torch.ones(size * count, 2) / 2, {})


def test_the_effective_number_is_k_for_equal_and_1_for_one_hot_coefficients() -> None:
    run = make_run(np.ones((4, 3)))
    run.steps[1]["encoder_coefficients"] = [0.0, 1.0, 0.0]
    run.steps[2]["encoder_coefficients"] = [0.5, 0.5, 0.0]
    trace = trace_of(run)
    np.testing.assert_allclose(trace.effective_encoder, [3, 1, 2, 3], rtol=1e-6)
    np.testing.assert_allclose(trace.effective_head, [3, 3, 3, 3], rtol=1e-6)


def test_accuracy_counts_known_labels_only() -> None:
    trace = trace_of(make_run(np.ones((3, 3)), labels=[0, 1, -1, 0, -1, -1]))
    np.testing.assert_allclose(trace.accuracy, [0.5, 1, np.nan])
    np.testing.assert_allclose(trace.running_accuracy, [1 / 2, 2 / 3, 2 / 3])


@pytest.mark.parametrize("labels", [[-1] * 6, []])
def test_a_stream_without_labels_has_no_accuracy(labels: list[int]) -> None:
    trace = trace_of(make_run(np.ones((3, 3)), labels=labels))
    assert trace.accuracy is None
    assert trace.running_accuracy is None
    assert trace.entropy.shape == (3, 3)


def test_a_method_without_coefficients_has_none() -> None:
    trace = trace_of(make_run(None))
    assert trace.encoder_coefficients is trace.entropy is trace.effective_encoder is None
    assert (trace.coefficient_changes, trace.entropy_changes) == ((), ())


def test_a_step_of_another_pool_is_refused_with_its_number() -> None:
    run = make_run(np.ones((4, 3)))
    run.steps[2]["entropy"] = [1.0, 1.0]
    with pytest.raises(InputError, match=r"Step 2 .* 2 numbers under 'entropy', but its pool has 3 experts"):
        trace_of(run)


def shifted(random: np.random.RandomState, batches: int = 40, at: int = 22) -> np.ndarray:
    series = 1 + 0.1 * random.randn(batches, 3)
    series[at:, 1] += 0.5
    return series


def test_a_planted_change_is_found_in_entropies_and_coefficients() -> None:
    trace = trace_of(make_run(shifted(np.random.RandomState(0))))
    assert trace.entropy_changes == (22,)
    assert trace.coefficient_changes == (22,)


def test_two_planted_changes_are_found_in_order() -> None:
    series = 0.1 * np.random.RandomState(1).randn(60, 2)
    series[20:40] += [1, -1]
    assert change_points(series) == (20, 40)


def test_batches_that_were_not_scored_are_passed_over() -> None:
    run = make_run(shifted(np.random.RandomState(0), batches=60, at=30))
    for t in range(60):
        if t % 2:
            run.steps[t]["entropy"] = None
    trace = trace_of(run)
    assert np.isnan(trace.entropy[1]).all()
    assert 30 in trace.entropy_changes
    assert all(place % 2 == 0 for place in trace.entropy_changes + trace.coefficient_changes)


def test_a_model_that_is_kept_between_looks_gives_no_changes_of_its_own() -> None:
    """Repeated coefficients halve the differences that the noise is measured by."""
    alarms = 0
    for seed in range(40):
        run = make_run(1 + 0.1 * np.random.RandomState(seed).randn(60, 3), momentum=0.5)
        state = np.full(3, 1 / 3)
        for t, step in enumerate(run.steps):
            state = state if t % 3 else (state + np.array(step["encoder_coefficients"])) / 2
            step["encoder_coefficients"] = state.tolist()
            step["entropy"] = None if t % 3 else step["entropy"]
        alarms += bool(trace_of(run).coefficient_changes)
    assert alarms <= 5


def test_unsmoothing_undoes_the_moving_average() -> None:
    raw = np.random.RandomState(0).dirichlet(np.ones(3), size=20)
    smooth, state = [], np.full(3, 1 / 3)
    for row in raw:
        state = 0.9 * state + 0.1 * row
        smooth.append(state)
    np.testing.assert_allclose(unsmoothed(np.array(smooth), 0.9), raw, atol=1e-12)
    assert unsmoothed(raw, 0) is raw


def test_a_moving_average_of_noise_is_no_change() -> None:
    alarms = 0
    for seed in range(40):
        random = np.random.RandomState(seed)
        run = make_run(1 + 0.1 * random.randn(40, 3), momentum=0.9)
        state = np.full(3, 1 / 3)
        for step in run.steps:
            state = 0.9 * state + 0.1 * np.array(step["encoder_coefficients"])
            step["encoder_coefficients"] = [float(f"{value:.7g}") for value in state]  # as a record rounds it
        alarms += bool(trace_of(run).coefficient_changes)
    assert alarms <= 5


@pytest.mark.parametrize("batches", [12, 32, 100])
@pytest.mark.parametrize("columns", [1, 3, 6])
def test_noise_gives_an_alarm_in_few_streams(batches: int, columns: int) -> None:
    """The rate that the docs state: at most 7 % in 12 to 100 batches; common noise and skew make no difference."""
    random = np.random.RandomState(0)
    for noise in (
        lambda: random.randn(batches, columns),
        lambda: random.gamma(2, size=(batches, columns)) + random.gamma(2, size=(batches, 1)),
    ):
        alarms = sum(bool(change_points(noise())) for _ in range(400))
        assert alarms / 400 <= 0.09  # 7 % and two standard errors of 400 streams


def test_a_shift_of_three_noise_widths_is_nearly_always_detected() -> None:
    random, detected = np.random.RandomState(0), 0
    for _ in range(100):
        series = random.randn(32, 3)
        series[16:] += 3 / np.sqrt(3)
        detected += any(abs(place - 16) <= 2 for place in change_points(series))
    assert detected >= 95


@pytest.mark.parametrize("series", [np.zeros((0, 3)), np.zeros((1, 3)), np.ones((50, 3)), np.random.rand(9, 2)])
def test_too_short_or_constant_series_have_no_changes(series: np.ndarray) -> None:
    assert change_points(series) == ()


def test_levels_last_and_the_scale_does_not_matter() -> None:
    series = np.random.RandomState(3).randn(30, 2)
    series[2:] += 50  # a level of two batches is none
    assert all(SHORTEST <= place <= 30 - SHORTEST for place in change_points(series))
    series = shifted(np.random.RandomState(0))
    assert change_points(series) == change_points(series * [1e-3, 1e3, 7] + 5) == (22,)


def test_the_best_split_is_that_of_a_naive_search() -> None:
    values = np.random.RandomState(0).randn(25, 3)

    def rise(place: int) -> float:
        parts = values[:place], values[place:]
        return ((values - values.mean(axis=0)) ** 2).sum() - sum(
            ((part - part.mean(axis=0)) ** 2).sum() for part in parts
        )

    place, best = best_split(values, 4)
    assert place == max(range(4, 22), key=rise)
    assert best == pytest.approx(rise(place))


DRAWINGS = (
    partial(draw_coefficients_over_time, part="encoder", colours=COLOURS),
    partial(draw_entropies, colours=COLOURS),
    draw_accuracy_over_time,
)


@pytest.mark.parametrize("draw", DRAWINGS)
def test_figures_label_their_axes_and_mark_changes(draw) -> None:
    trace = trace_of(make_run(shifted(np.random.RandomState(0))))
    _, axes = new_figure(4, 3)
    draw(axes[0, 0], trace)
    assert axes[0, 0].get_xlabel() == "batch"
    assert axes[0, 0].get_ylabel()
    marked = [line for line in axes[0, 0].lines if line.get_label() == "change of level"]
    assert [line.get_xdata()[0] for line in marked] == [22.5]


@pytest.mark.parametrize("draw", DRAWINGS)
def test_figures_say_what_they_have_nothing_of(draw) -> None:
    _, axes = new_figure(4, 3)
    draw(axes[0, 0], trace_of(make_run(None, labels=[])))
    assert "no" in axes[0, 0].texts[0].get_text()
