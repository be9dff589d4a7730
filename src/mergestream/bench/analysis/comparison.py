"""Runs compared: results per method and stream, and intervals over groups."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from mergestream.bench.records import Run
from mergestream.functional import intervals

ORACLE = "oracle: best single expert"
SINGLES = "single_expert, on average"
EXPERT_ROWS = (ORACLE, SINGLES)  # bounds, not methods: they are never bold
METRICS = ("accuracy", "balanced_accuracy", "auroc")
MEANS = ("auroc", "nll", "brier", "ece", "calibration_in_the_large", "aurc")  # without an interval
T = TypeVar("T")
Cell = TypeVar("Cell", bound=tuple[str, ...])  # what the runs of a cell share, such as label and stream
Draws = dict[str, np.ndarray]  # by metric; or how often each image of a target is drawn, for all runs there


class Pairing(NamedTuple):
    """What two runs must share to be compared, beside the name of the stream."""

    target: str
    training_seed: str  # the pool's fingerprint
    stream_seed: int


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def times(self, factor: float) -> "Estimate":
        low, high = sorted((factor * self.low, factor * self.high))
        return Estimate(factor * self.mean, low, high)

    def points(self) -> str:
        """A difference of shares in percentage points, with its interval where there is one."""
        interval = "" if np.isnan(self.low) else f" [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        return f"{100 * self.mean:+.1f}{interval}"


@dataclass(frozen=True)
class ResultRow:
    """One method on one stream, over all its targets and seeds."""

    label: str
    stream: str
    accuracy: Estimate
    balanced_accuracy: Estimate
    auroc: float | None
    nll: float
    brier: float
    ece: float
    calibration_in_the_large: float
    aurc: float
    per_target: dict[str, float]
    worst_target: str
    recall: dict[str, float | None]
    lowest_recall: float
    milliseconds: float | None
    runs: int


def rows_of(runs: Sequence[Run]) -> list[ResultRow]:
    """One row per method and stream; single experts give two, their average and the oracle's choice among them."""
    single = [run for run in runs if run.is_single]
    rows = compare(run for run in runs if not run.is_single)
    for label, group in ((SINGLES, single), (ORACLE, oracle(single))):
        rows += [_result_row(label, stream, own) for stream, own in grouped(group, "stream").items()]
    return rows


def compare(runs: Iterable[Run]) -> list[ResultRow]:
    """One row per (label, stream), in order of first appearance."""
    return [_result_row(label, stream, group) for (label, stream), group in grouped(runs, "label", "stream").items()]


def oracle(single: Sequence[Run]) -> list[Run]:
    """Per target, seed and stream, the single expert that labels show to be best. A bound, never a method."""
    best: dict[tuple[Any, ...], Run] = {}
    for run in single:
        key = *pairing_of(run), run.stream
        if key not in best or run.accuracy > best[key].accuracy:
            best[key] = run
    return list(best.values())


def grouped(items: Iterable[T], *attributes: str) -> dict[Any, list[T]]:
    """Items by the value of an attribute, or by the values of several, in order of first appearance."""
    groups: dict[Any, list[T]] = defaultdict(list)
    for item in items:
        groups[attrgetter(*attributes)(item)].append(item)
    return groups


def pairing_of(run: Run) -> Pairing:
    return Pairing(run.target, run.training_seed, run.stream_seed)


def by_pairing(runs: Sequence[Run], label: str, stream: str) -> dict[Pairing, Run]:
    """A method's runs on one stream, by target, pool and stream seed."""
    return {pairing_of(run): run for run in runs if (run.label, run.stream) == (label, stream)}


def _result_row(label: str, stream: str, runs: Sequence[Run]) -> ResultRow:
    confusions, targets = [run.confusions() for run in runs], [run.target for run in runs]
    per_target = {name: float(np.mean([run.accuracy for run in own])) for name, own in grouped(runs, "target").items()}
    recalls = {name: _defined(run.metrics["recall"][name] for run in runs) for name in runs[0].classes}
    seconds = _defined(run.seconds_per_step for run in runs)
    return ResultRow(
        label,
        stream,
        Estimate(*intervals.mean_with_interval(confusions, "accuracy", targets=targets)),
        Estimate(*intervals.mean_with_interval(confusions, "balanced_accuracy", targets=targets)),
        **{key: _target_mean(runs, key) for key in MEANS},
        per_target=per_target,
        worst_target=min(per_target, key=per_target.__getitem__),
        recall={name: float(np.mean(values)) if values else None for name, values in recalls.items()},
        lowest_recall=min(value for values in recalls.values() for value in values),
        milliseconds=1000 * float(np.median(seconds)) if seconds else None,
        runs=len(runs),
    )


def _target_mean(runs: Sequence[Run], metric: str) -> Any:
    """Mean over the targets that define it; None where no run does."""
    own = [(run.metrics[metric], run.target) for run in runs if run.metrics[metric] is not None]
    return intervals.target_mean(*zip(*own, strict=True)) if own else None


def _defined(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


@dataclass(frozen=True)
class GroupedRow:
    """One method on one stream, with intervals over groups; AUROC is None where a target has one class."""

    label: str
    stream: str
    accuracy: Estimate
    balanced_accuracy: Estimate
    auroc: Estimate | None


def grouped_rows(runs: Sequence[Run]) -> list[GroupedRow]:
    """One row per (label, stream), the mean over its runs; none where a target names no groups or too few."""
    if not runs or any(run.groups is None for run in runs):
        return []
    cells = grouped(runs, "label", "stream")
    try:
        draws = mean_draws(cells, METRICS)
    except ValueError:
        return []
    rows = []
    for (label, stream), own in cells.items():
        estimates: list[Estimate | None] = []
        for metric, drawn in draws[label, stream].items():
            values = [run.metrics[metric] for run in own]
            complete = None not in values and not np.isnan(drawn).any()
            estimates.append(Estimate(float(np.mean(values)), *intervals.percentiles(drawn)) if complete else None)
        accuracy, balanced, auroc = estimates
        if accuracy is not None and balanced is not None:
            rows.append(GroupedRow(label, stream, accuracy, balanced, auroc))
    return rows


def mean_draws(
    cells: Mapping[Cell, Sequence[Run]], metrics: Sequence[str], count: int = intervals.RESAMPLES
) -> dict[Cell, Draws]:
    """Draws of every metric [count], as the mean over each cell's runs."""
    draws: Draws = {}
    means = {}
    for cell, runs in cells.items():
        scores = [_scores_under_draws(run, metrics, draws, count) for run in runs]
        means[cell] = {metric: np.mean([each[metric] for each in scores], axis=0) for metric in metrics}
    return means


def _scores_under_draws(run: Run, metrics: Sequence[str], draws: Draws, count: int) -> Draws:
    """Every metric of a run under draws of whole groups [count]; of single images where its data name no groups."""
    arrived = np.concatenate(run.batches)
    place = torch.from_numpy(np.argsort(arrived))  # from order of arrival to that of the data
    labels = run.labels[place]
    # A stream may hold a part of its target's images: runs on the same ones share their draws.
    images = f"{run.target}/{hashlib.sha256(np.sort(arrived).tobytes()).hexdigest()}"
    if images not in draws:
        # Units are numbered in the order of their names, images without a group by the text of their number.
        names = np.array([str(i) for i in range(len(labels))]) if run.groups is None else run.groups[place].numpy()
        units = np.unique(names, return_inverse=True)[1]
        key = f"{run.arguments['data']['dataset']}/{run.target}"
        draws[images] = intervals.unit_draws(labels.numpy(), units, key, count)
    weights = torch.from_numpy(draws[images]).double()
    scores = intervals.drawn_scores(run.probabilities[place], run.predictions[place], labels, weights, metrics)
    return {metric: values.numpy() for metric, values in scores.items()}
