"""Intervals that resample whole slides or patients, for data sets that name them: accuracies and AUROC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mergestream.bench.analysis.comparison import Estimate, by_label_and_stream
from mergestream.bench.records import Run
from mergestream.functional.intervals import RESAMPLES, drawn_scores, percentiles, unit_draws

METRICS = ("accuracy", "balanced_accuracy", "auroc")
Draws = dict[str, np.ndarray]  # by metric; or how often each image of a target is drawn, for all runs there


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
    cells = by_label_and_stream(runs)
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
            estimates.append(Estimate(float(np.mean(values)), *percentiles(drawn)) if complete else None)
        accuracy, balanced, auroc = estimates
        if accuracy is not None and balanced is not None:
            rows.append(GroupedRow(label, stream, accuracy, balanced, auroc))
    return rows


def mean_draws(
    cells: Mapping[tuple[str, str], Sequence[Run]], metrics: Sequence[str], count: int = RESAMPLES
) -> dict[tuple[str, str], Draws]:
    """Draws of every metric [count], as the mean over each cell's runs."""
    draws: Draws = {}
    means = {}
    for cell, runs in cells.items():
        scores = [_scores_under_draws(run, metrics, draws, count) for run in runs]
        means[cell] = {metric: np.mean([each[metric] for each in scores], axis=0) for metric in metrics}
    return means


def _scores_under_draws(run: Run, metrics: Sequence[str], draws: Draws, count: int) -> Draws:
    """Every metric of a run under draws of whole groups [count]; of single images where its data name no groups."""
    dataset, target = run.arguments["data"]["dataset"], run.arguments["data"]["domain"]
    place = torch.from_numpy(np.argsort(np.concatenate(run.batches)))  # from order of arrival to that of the data
    labels = run.labels[place]
    if target not in draws:
        # Units are numbered in the order of their names, images without a group by the text of their number.
        names = np.array([str(i) for i in range(len(labels))]) if run.groups is None else run.groups[place].numpy()
        units = np.unique(names, return_inverse=True)[1]
        draws[target] = unit_draws(labels.numpy(), units, f"{dataset}/{target}", count)
    weights = torch.from_numpy(draws[target]).double()
    scores = drawn_scores(run.probabilities[place], run.predictions[place], labels, weights, metrics)
    return {metric: values.numpy() for metric, values in scores.items()}
