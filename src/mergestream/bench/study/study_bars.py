"""Means and paired differences from a record's groups, and the bars that the published results are held to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.study.results_plan import HEAD_INITS, LOSS, LOUD, METRICS, OURS, PAPER
from mergestream.bench.study.study_record import Group, decoded
from mergestream.functional.intervals import percentiles
from mergestream.functional.metrics import collapsed_classes

TOLERANCE = 0.5  # points that ours may lose to the paper's rule anywhere
SHOWN = 4  # losses in one sentence; the tables have them all
TITLES = {"pacs": "PACS", "midog": "MIDOG"}


@dataclass(frozen=True)
class Setting:
    """A stream and its condition, such as the batch size."""

    stream: str
    condition: str = ""

    def __str__(self) -> str:
        return f"{self.stream}, {self.condition}" if self.condition else self.stream


def select(
    groups: Sequence[Group], kind: str, dataset: str, start: str, loss: str | None = None, *, later: bool = False
) -> list[Group]:
    """Pools of all seeds that were trained alike, by default with the data set's usual loss."""
    fields = {"kind": kind, "dataset": dataset, "head_init": start, "loss": loss or LOSS[dataset], "later": later}
    chosen = [group for group in groups if all(group[key] == value for key, value in fields.items())]
    return sorted(chosen, key=lambda group: int(group["seed"]))


def settings_of(groups: Sequence[Group]) -> list[Setting]:
    """All streams and conditions, in the order of the rows."""
    return list(dict.fromkeys(Setting(row["stream"], row["condition"]) for group in groups for row in group["rows"]))


def methods_of(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(row["method"] for group in groups for row in group["rows"]))


def estimate(groups: Sequence[Group], method: str, at: Setting, metric: str) -> Estimate | None:
    """The mean over targets and seeds; None where the method is missing at a target. Without draws no interval."""
    return _combined([(_mean(g, method, at, metric), _draws(g, method, at, metric)) for g in groups])


def difference(groups: Sequence[Group], ours: str, theirs: str, at: Setting, metric: str) -> Estimate | None:
    """Ours less theirs, pool by pool on the same draws."""
    gaps: list[tuple[float | None, np.ndarray | None]] = []
    for group in groups:
        mean, other_mean = (_mean(group, method, at, metric) for method in (ours, theirs))
        draws, other_draws = (_draws(group, method, at, metric) for method in (ours, theirs))
        mean_gap = None if mean is None or other_mean is None else mean - other_mean
        gaps.append((mean_gap, None if draws is None or other_draws is None else draws - other_draws))
    return _combined(gaps)


def points(value: Estimate) -> str:
    """A difference in points of a per cent, with its interval where there is one."""
    mean, low, high = (100 * each for each in (value.mean, value.low, value.high))
    return f"{mean:+.1f}" if np.isnan(low) else f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _combined(pools: Sequence[tuple[float | None, np.ndarray | None]]) -> Estimate | None:
    means = [mean for mean, _ in pools if mean is not None]
    draws = [each for _, each in pools if each is not None]
    if not pools or len(means) < len(pools):
        return None
    low, high = percentiles(np.mean(draws, axis=0)) if len(draws) == len(pools) else (float("nan"),) * 2
    return Estimate(float(np.mean(means)), low, high)


def _mean(group: Group, method: str, at: Setting, metric: str) -> float | None:
    here = [row for row in group["rows"] if (row["stream"], row["condition"]) == (at.stream, at.condition)]
    values = [row[metric] for row in here if row["method"] == method]
    complete = len(values) == len({row["target"] for row in here}) > 0
    return float(np.mean(values)) if complete and None not in values else None


def _draws(group: Group, method: str, at: Setting, metric: str) -> np.ndarray | None:
    stored = group["resamples"].get(f"{method}|{at.stream}|{at.condition}", {}).get(metric)
    return None if stored is None else decoded(stored)


@dataclass(frozen=True)
class Bar:
    """One claim at one place. `holds` is None where it was not measured."""

    holds: bool | None
    sentence: str


def all_bars(groups: Sequence[Group]) -> list[Bar]:
    bars = list(_above(groups, PAPER, "mean", (0.0, 0.0)))
    bars += _above(groups, OURS, PAPER, (1.0, 1.5))
    bars += _above(groups, OURS, "ensemble", (2.0, 5.0))
    bars += _not_below_ensemble(groups)
    return [*bars, _nowhere_worse(groups), _no_collapse(groups), *_not_captured(groups)]


def _above(groups: Sequence[Group], ours: str, theirs: str, least: tuple[float, float]) -> Iterator[Bar]:
    """PACS: the mean difference reaches the bar, and its interval lies above zero."""
    for start in HEAD_INITS:
        for stream, needed in zip(("iid", "dirichlet:0.05"), least, strict=True):
            gap = difference(select(groups, "main", "pacs", start), ours, theirs, Setting(stream), "accuracy")
            holds = gap is not None and gap.low > 0 and 100 * gap.mean >= needed
            bar = f"at least {needed:+.1f} and the interval above 0" if needed else "the interval above 0"
            yield _bar(f"{ours} - {theirs}", f"PACS, {start} heads, {stream}, accuracy", gap, holds, bar)


def _not_below_ensemble(groups: Sequence[Group]) -> Iterator[Bar]:
    """MIDOG: no interval of ours less the ensemble lies wholly below zero, on any stream."""
    for place, gap in differences(groups, "midog", OURS, "ensemble", ("main", "streams")):
        holds = gap is not None and gap.high >= 0
        yield _bar(f"{OURS} - ensemble", place, gap, holds, "the interval not below 0")


def _bar(claim: str, place: str, gap: Estimate | None, holds: bool, bar: str) -> Bar:
    if gap is None:
        return Bar(None, f"{place}: {claim} was not measured.")
    return Bar(holds, f"{place}: {claim} = {points(gap)} points; bar: {bar}. **{_verdict(holds)}**")


def _verdict(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def differences(
    groups: Sequence[Group], dataset: str, ours: str, theirs: str, kinds: Sequence[str] = ("main", "streams", "batches")
) -> Iterator[tuple[str, Estimate | None]]:
    """At every head start, stream and batch size of a data set, for each of its metrics."""
    for start in HEAD_INITS:
        for kind in kinds:
            own = select(groups, kind, dataset, start)
            for at in settings_of(own):
                for metric in METRICS[dataset]:
                    place = f"{TITLES[dataset]}, {start} heads, {at}, {metric.replace('_', ' ')}"
                    yield place, difference(own, ours, theirs, at, metric)


def _nowhere_worse(groups: Sequence[Group]) -> Bar:
    claim = f"{OURS} nowhere worse than {PAPER} by more than {TOLERANCE}"
    every = [(p, gap) for name in METRICS for p, gap in differences(groups, name, OURS, PAPER) if gap is not None]
    if not every:
        return Bar(None, f"{claim}: not measured.")
    every.sort(key=lambda each: each[1].mean)
    place, worst = every[0]
    lost = [each for each in every if 100 * each[1].mean < -TOLERANCE]
    text = f"lowest of {len(every)} differences: {points(worst)} ({place})"
    text += f"; it loses at {len(lost)}" if lost else ""
    text += "".join(f"; {place}: {points(gap)}" for place, gap in lost[1:SHOWN])
    text += f"; and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
    return Bar(not lost, f"{claim}: {text}. **{_verdict(not lost)}**")


def collapses_of(groups: Sequence[Group], method: str) -> tuple[int, list[str]]:
    """How many rows a method has in main, streams and batches, and every class that one of them has given up."""
    rows, collapsed = 0, []
    for group in (g for g in groups if g["kind"] in ("main", "streams", "batches")):
        for row in (row for row in group["rows"] if row["method"] == method):
            rows += 1
            experts = [_answers(counts) for counts in group["experts"][row["target"]].values()]
            for lost in collapsed_classes(torch.stack(experts), _answers(row["said"]), group["classes"]):
                where = f"{group['pool']}, {Setting(row['stream'], row['condition'])}"
                shares = f"{100 * lost['share']:.1f} % of the answers, {100 * lost['experts']:.1f} % of the experts'"
                collapsed.append(f"'{lost['class']}' at {row['target']} ({where}): {shares}")
    return rows, collapsed


def _answers(counts: Sequence[int]) -> torch.Tensor:
    """Any answers with these counts: their order does not matter."""
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts))


def _no_collapse(groups: Sequence[Group]) -> Bar:
    claim = f"no collapse of {OURS}"
    usual = [g for g in groups if not g["later"] and g["loss"] == LOSS[g["dataset"]]]
    rows, collapsed = collapses_of(usual, OURS)
    if not rows:
        return Bar(None, f"{claim}: not measured.")
    text = f"{len(collapsed)} in {rows} runs" + (f", such as {collapsed[0]}" if collapsed else "")
    return Bar(not collapsed, f"{claim}: {text}. **{_verdict(not collapsed)}**")


def loud_rows(groups: Sequence[Group], dataset: str, method: str) -> dict[str, dict[str, float]]:
    """Scores and agreement with the loud expert by condition, mean over targets."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for group in (g for g in groups if g["kind"] == "hostile" and g["dataset"] == dataset and not g["later"]):
        for row in (row for row in group["rows"] if row["method"] == method):
            rows.setdefault(row["condition"], []).append(row)
    keys = (*METRICS[dataset], "agrees_with_loud")
    return {c: {key: float(np.mean([row[key] for row in own])) for key in keys} for c, own in rows.items()}


def _not_captured(groups: Sequence[Group]) -> Iterator[Bar]:
    """Captured: of the answers that were not the loud expert's before, more than half have become its own."""
    for dataset, metrics in METRICS.items():
        for method in (OURS, PAPER):
            claim = f"a head x{LOUD:g} does not capture {method}"
            by = loud_rows(groups, dataset, method)
            if len(by) < 2:
                yield Bar(None, f"{TITLES[dataset]}: {claim}: not measured.")
                continue
            before, after = by["head x1"], by[f"head x{LOUD:g}"]
            agreed = before["agrees_with_loud"], after["agrees_with_loud"]
            holds = agreed[1] - agreed[0] <= (1 - agreed[0]) / 2
            scores = ", ".join(
                f"{name.replace('_', ' ')} {100 * before[name]:.1f} -> {100 * after[name]:.1f}" for name in metrics
            )
            text = f"answers that are that expert's own {100 * agreed[0]:.1f} -> {100 * agreed[1]:.1f} %, {scores}"
            yield Bar(holds, f"{TITLES[dataset]}, shared heads, iid: {claim}: {text}. **{_verdict(holds)}**")
