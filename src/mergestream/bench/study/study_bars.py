"""Means, paired differences and verdicts from a record's groups, and the bars that the study is held to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.analysis.duels import MEAN, WORST, Endpoint, endpoint_of
from mergestream.bench.study.results_plan import COMPARED, HEAD_INITS, LOSS, LOUD, METRICS, OURS, PAPER
from mergestream.bench.study.study_record import SCORES, Group, Setting, decoded
from mergestream.functional.intervals import percentiles, target_mean
from mergestream.functional.metrics import collapsed_classes
from mergestream.functional.nested_bootstrap import PairedDifference, Tree, resample_tree
from mergestream.functional.non_inferiority import MARGINS

TOLERANCE = 0.5  # points that ours may lose to the paper's rule anywhere
FARTHEST = 2.0  # points that ours may be below the ensemble at any single target
SHOWN = 4  # losses in one sentence; the tables have them all
RESAMPLES = 1000
UNITS = "groups or images"
TITLES = {"pacs": "PACS", "midog": "MIDOG"}


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
    pools = [_scores(group, method, at, metric) for group in groups]
    if not pools or np.isnan([mean for mean, _ in pools]).any():
        return None
    draws = np.broadcast_arrays(*(draws for _, draws in pools))
    return Estimate(float(np.mean([mean for mean, _ in pools])), *percentiles(np.mean(draws, axis=0)))


def difference(groups: Sequence[Group], ours: str, theirs: str, at: Setting, metric: str) -> Estimate | None:
    """Ours less theirs by the hierarchical bootstrap; without draws, as of batch sizes, no interval."""
    result = paired_difference(groups, ours, theirs, at, metric)
    if result is not None:
        return Estimate(result.mean, *result.interval)
    mine, other = (estimate(groups, method, at, metric) for method in (ours, theirs))
    return Estimate(mine.mean - other.mean, np.nan, np.nan) if mine and other else None


def _scores(group: Group, method: str, at: Setting, metric: str) -> tuple[float, np.ndarray]:
    """A method's mean over one pool's targets, and its draws; NaN where they were not measured."""
    here = [row for row in group["rows"] if (row["stream"], row["condition"]) == (at.stream, at.condition)]
    scores = stream_scores(group, method, at, metric)
    targets = {row["target"] for row in here}
    complete = {target for target, _ in scores} == targets and len(targets) > 0
    mean = target_mean(list(scores.values()), [target for target, _ in scores]) if complete else np.nan
    draws = list(target_draws(group, method, at, metric).values())
    return mean, np.mean(draws, axis=0) if draws else np.array([np.nan])


def endpoints(
    groups: Sequence[Group], ours: str, theirs: str, at: Setting, metric: str
) -> tuple[Endpoint, Endpoint] | None:
    """Both primary endpoints of one metric: the mean over targets and the worst target."""
    result = paired_difference(groups, ours, theirs, at, metric)
    if result is None:
        return None
    (mean, _), (worst, _) = (endpoint_of(metric, scope, result, MARGINS[metric]) for scope in (MEAN, WORST))
    return mean, worst


def paired_difference(
    groups: Sequence[Group], ours: str, theirs: str, at: Setting, metric: str
) -> PairedDifference | None:
    """Ours less theirs over targets, pools, stream seeds and images; None without draws.

    A pool's draws at a target are means over its stream seeds: each seed has its own difference, and they share what
    other images might have shown.
    """
    tree: Tree = {}
    for group in groups:
        mine, other = (target_draws(group, method, at, metric) for method in (ours, theirs))
        scores = [stream_scores(group, method, at, metric) for method in (ours, theirs)]
        if not mine or mine.keys() != other.keys() or scores[0].keys() != scores[1].keys():
            return None
        for target in mine:
            gaps = [scores[0][place] - scores[1][place] for place in scores[0] if place[0] == target]
            # As many as the resamples of targets and seeds: the stored ones in turn.
            noise = np.resize(mine[target] - other[target], RESAMPLES) - np.mean(gaps)
            streams = [np.concatenate([[gap], gap + noise]) for gap in gaps]
            tree.setdefault(target, {})[group["pool"]] = streams
    return resample_tree(tree, UNITS) if tree else None


def target_draws(group: Group, method: str, at: Setting, metric: str) -> dict[str, np.ndarray]:
    """Draws of one pool by target; none where none were stored."""
    stored = group["resamples"].get(f"{method}|{at.stream}|{at.condition}", {}).get(metric, {})
    return {target: decoded(text) for target, text in stored.items()}


def stream_scores(group: Group, method: str, at: Setting, metric: str) -> dict[tuple[str, int], float]:
    """Scores by target and stream seed."""
    rows = [
        row
        for row in group["rows"]
        if (row["method"], row["stream"], row["condition"]) == (method, at.stream, at.condition)
    ]
    return {(row["target"], row["stream_seed"]): row[metric] for row in rows if row.get(metric) is not None}


@dataclass(frozen=True)
class Bar:
    """One claim at one place. `holds` is None where it was not measured."""

    holds: bool | None
    sentence: str


def all_bars(groups: Sequence[Group]) -> list[Bar]:
    bars = list(_above(groups, PAPER, "mean", (0.0, 0.0)))
    bars += _above(groups, OURS, PAPER, (1.0, 1.5))
    bars += _above(groups, OURS, "ensemble", (2.0, 5.0))
    return [*bars, *_not_inferior(groups), _nowhere_worse(groups), _no_collapse(groups), *_not_captured(groups)]


def _bar(place: str, holds: bool) -> Bar:
    return Bar(holds, f"{place}. **{'holds' if holds else 'does not hold'}**")


def _above(groups: Sequence[Group], ours: str, theirs: str, least: tuple[float, float]) -> Iterator[Bar]:
    """PACS: the mean difference reaches the bar, and its interval lies above zero."""
    for start in HEAD_INITS:
        for stream, needed in zip(("iid", "dirichlet:0.05"), least, strict=True):
            gap = difference(select(groups, "main", "pacs", start), ours, theirs, Setting(stream), "accuracy")
            claim = f"PACS, {start} heads, {stream}, accuracy: {ours} - {theirs}"
            if gap is None:
                yield Bar(None, f"{claim} was not measured.")
                continue
            bar = f"at least {needed:+.1f} and the interval above 0" if needed else "the interval above 0"
            yield _bar(f"{claim} = {gap.points()} points; bar: {bar}", gap.low > 0 and 100 * gap.mean >= needed)


def _not_inferior(groups: Sequence[Group]) -> Iterator[Bar]:
    """Ours against each compared method: not inferior in the mean over targets, nor far below the ensemble anywhere."""
    for dataset, rival in product(METRICS, [name for name in COMPARED if name != OURS]):
        for place, own, at, metric in places(groups, dataset, ("main", "streams"), SCORES):
            verdicts = endpoints(own, OURS, rival, at, metric)
            if verdicts is None:
                continue
            mean, worst = verdicts
            text = f"{place}: {OURS} - {rival} = {mean.difference.points()} points, {mean.outcome}"
            yield _bar(
                f"{text}; bar: not inferior at a margin of {100 * mean.margin:g}",
                mean.outcome in ("better", "not inferior"),
            )
            if rival == "ensemble":
                text = f"{place}, worst target ({worst.target}): {OURS} - {rival} = {worst.difference.points()} points"
                yield _bar(f"{text}; bar: at least -{FARTHEST:g}", 100 * worst.difference.mean >= -FARTHEST)


def differences(groups: Sequence[Group], dataset: str, ours: str, theirs: str) -> Iterator[tuple[str, Estimate]]:
    """At every head start, stream and batch size of a data set, for each of its metrics."""
    for place, own, at, metric in places(groups, dataset, ("main", "streams", "batches")):
        gap = difference(own, ours, theirs, at, metric)
        if gap is not None:
            yield place, gap


def places(
    groups: Sequence[Group], dataset: str, kinds: Sequence[str], metrics: Sequence[str] = ()
) -> Iterator[tuple[str, list[Group], Setting, str]]:
    """Every head start, stream, batch size and metric of a data set: in words, its groups, setting and metric."""
    for start, kind in product(HEAD_INITS, kinds):
        own = select(groups, kind, dataset, start)
        for at, metric in product(settings_of(own), metrics or METRICS[dataset]):
            yield f"{TITLES[dataset]}, {start} heads, {at}, {metric.replace('_', ' ')}", own, at, metric


def _nowhere_worse(groups: Sequence[Group]) -> Bar:
    claim = f"{OURS} nowhere worse than {PAPER} by more than {TOLERANCE}"
    every = [each for dataset in METRICS for each in differences(groups, dataset, OURS, PAPER)]
    if not every:
        return Bar(None, f"{claim}: not measured.")
    every.sort(key=lambda each: each[1].mean)
    place, worst = every[0]
    lost = [each for each in every if 100 * each[1].mean < -TOLERANCE]
    text = f"lowest of {len(every)} differences: {worst.points()} ({place})"
    text += f"; it loses at {len(lost)}" if lost else ""
    text += "".join(f"; {place}: {gap.points()}" for place, gap in lost[1:SHOWN])
    text += f"; and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
    return _bar(f"{claim}: {text}", not lost)


def collapses_of(groups: Sequence[Group], method: str) -> tuple[int, list[str]]:
    """How many rows a method has in main, streams and batches, and every class that vanished in one of them."""
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
    return _bar(f"{claim}: {text}", not collapsed)


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
            yield _bar(f"{TITLES[dataset]}, shared heads, iid: {claim}: {text}", holds)
