"""The bars that the evidence is held to: each sentence is computed, whether it holds and by which numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pairing import Where, difference, places, select
from recipes import HEAD_INITS, LOUDNESS, METRICS, PAPER
from records import Group

from mergestream.bench.analysis.comparison import Estimate
from mergestream.functional.metrics import collapsed_classes

LOSS = {"pacs": "plain", "midog": "weighted"}
TITLES = {"pacs": "PACS", "midog": "MIDOG"}
WORSE = 0.5  # points that ours may lose to the paper's rule anywhere
TOLD = 4  # losses in one sentence; the tables have them all


@dataclass(frozen=True)
class Bar:
    """One claim at one place. `holds` is None where it was not measured."""

    claim: str
    holds: bool | None
    sentence: str


def points(value: Estimate) -> str:
    mean, low, high = (100 * each for each in (value.mean, value.low, value.high))
    return f"{mean:+.1f}" if math.isnan(low) else f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def all_bars(groups: Sequence[Group], ours: str) -> list[Bar]:
    """Those of the issue, in its order. Of ours only where there is a rule of our own."""
    found = list(_above(groups, PAPER, "mean", {"iid": 0.0, "dirichlet:0.05": 0.0}))
    if ours != PAPER:
        found += _above(groups, ours, PAPER, {"iid": 1.0, "dirichlet:0.05": 1.5})
        found += _above(groups, ours, "ensemble", {"iid": 2.0, "dirichlet:0.05": 5.0})
        found += _not_below_ensemble(groups, ours)
        found.append(_nowhere_worse(groups, ours))
    found.append(_no_collapse(groups, ours))
    return [*found, *_not_captured(groups, ours)]


def _above(groups: Sequence[Group], ours: str, theirs: str, wanted: dict[str, float]) -> Iterator[Bar]:
    """PACS: the mean difference reaches the bar, and its interval lies above zero."""
    for start in HEAD_INITS:
        own = select(groups, "main", "pacs", start, LOSS["pacs"])
        for stream, least in wanted.items():
            gap = difference(own, ours, own, theirs, Where(stream), "accuracy")
            holds = None if gap is None else gap.low > 0 and 100 * gap.mean >= least
            bar = f"at least {least:+.1f} and the interval above 0" if least else "the interval above 0"
            yield _bar(f"{ours} - {theirs}", f"PACS, {start} heads, {stream}, accuracy", gap, holds, bar)


def _not_below_ensemble(groups: Sequence[Group], ours: str) -> Iterator[Bar]:
    """MIDOG: no interval of ours less the ensemble lies wholly below zero, on any stream."""
    for start in HEAD_INITS:
        for kind in ("main", "streams"):
            own = select(groups, kind, "midog", start, LOSS["midog"])
            for where in places(own):
                for metric in METRICS["midog"]:
                    gap = difference(own, ours, own, "ensemble", where, metric)
                    holds = None if gap is None else gap.high >= 0
                    place = f"MIDOG, {start} heads, {where.told}, {metric.replace('_', ' ')}"
                    yield _bar(f"{ours} - ensemble", place, gap, holds, "the interval not below 0")


def _bar(claim: str, place: str, gap: Estimate | None, holds: bool | None, bar: str) -> Bar:
    if gap is None:
        return Bar(claim, None, f"{place}: {claim} was not measured.")
    verdict = "holds" if holds else "does not hold"
    return Bar(claim, holds, f"{place}: {claim} = {points(gap)} points; bar: {bar}. **{verdict}**")


def differences_everywhere(groups: Sequence[Group], ours: str, theirs: str) -> list[tuple[str, Estimate]]:
    """On every data set, head start, stream and batch size, for every metric of the data set."""
    found = []
    for dataset, metrics in METRICS.items():
        for start in HEAD_INITS:
            for kind in ("main", "streams", "batches"):
                own = select(groups, kind, dataset, start, LOSS[dataset])
                for where in places(own):
                    for metric in metrics:
                        gap = difference(own, ours, own, theirs, where, metric)
                        if gap is not None:
                            place = f"{TITLES[dataset]}, {start} heads, {where.told}, {metric.replace('_', ' ')}"
                            found.append((place, gap))
    return found


def _nowhere_worse(groups: Sequence[Group], ours: str) -> Bar:
    claim = f"{ours} nowhere worse than {PAPER} by more than {WORSE}"
    every = differences_everywhere(groups, ours, PAPER)
    if not every:
        return Bar(claim, None, f"{claim}: not measured.")
    lost = [(place, gap) for place, gap in every if 100 * gap.mean < -WORSE]
    worst = min(every, key=lambda each: each[1].mean)
    told = f"lowest of {len(every)} differences: {points(worst[1])} ({worst[0]})"
    told += f"; it loses at {len(lost)}" if lost else ""
    losses = "".join(f"; {place}: {points(gap)}" for place, gap in sorted(lost, key=_mean_gap)[1:TOLD])
    losses += f"; and {len(lost) - TOLD} more" if len(lost) > TOLD else ""
    return Bar(claim, not lost, f"{claim}: {told}{losses}. **{'does not hold' if lost else 'holds'}**")


def _mean_gap(each: tuple[str, Estimate]) -> float:
    return each[1].mean


def collapses(groups: Sequence[Group], method: str) -> tuple[int, list[str]]:
    """How many rows of a method were looked at, and every class that one of them has given up."""
    looked, found = 0, []
    for group in groups:
        if group["kind"] not in ("main", "streams", "batches"):
            continue
        for row in (row for row in group["rows"] if row["method"] == method):
            looked += 1
            experts = [_answers(counts) for counts in group["experts"][row["target"]].values()]
            for lost in collapsed_classes(torch.stack(experts), _answers(row["said"]), group["classes"]):
                where = f"{group['pool']}, {Where(row['stream'], row['condition']).told}"
                shares = f"{100 * lost['share']:.1f} % of the answers, {100 * lost['experts']:.1f} % of the experts'"
                found.append(f"'{lost['class']}' at {row['target']} ({where}): {shares}")
    return looked, found


def _answers(counts: Sequence[int]) -> torch.Tensor:
    """Any answers with these counts: their order does not matter."""
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts))


def _no_collapse(groups: Sequence[Group], ours: str) -> Bar:
    claim = f"no collapse of {ours}"
    looked, found = collapses([g for g in groups if not g["later"] and g.get("loss") == LOSS[g["dataset"]]], ours)
    if not looked:
        return Bar(claim, None, f"{claim}: not measured.")
    told = f"{len(found)} in {looked} runs" + (f", such as {found[0]}" if found else "")
    return Bar(claim, not found, f"{claim}: {told}. **{'does not hold' if found else 'holds'}**")


def loud_rows(groups: Sequence[Group], dataset: str, method: str) -> dict[str, dict[str, float]]:
    """Scores and agreement with the loud expert by condition, mean over targets."""
    found: dict[str, list[dict[str, Any]]] = {}
    for group in (g for g in groups if g["kind"] == "hostile" and g["dataset"] == dataset and not g["later"]):
        for row in (row for row in group["rows"] if row["method"] == method):
            found.setdefault(row["condition"], []).append(row)
    keys = (*METRICS[dataset], "agrees_with_loud")
    return {c: {key: float(np.mean([row[key] for row in rows])) for key in keys} for c, rows in found.items()}


def _not_captured(groups: Sequence[Group], ours: str) -> Iterator[Bar]:
    """Captured: of the answers that were not the loud expert's before, more than half have become its own."""
    for dataset, metrics in METRICS.items():
        for method in dict.fromkeys((ours, PAPER)):
            claim = f"a head x{LOUDNESS:g} does not capture {method}"
            by = loud_rows(groups, dataset, method)
            if len(by) < 2:
                yield Bar(claim, None, f"{TITLES[dataset]}: {claim}: not measured.")
                continue
            before, after = by["head x1"], by[f"head x{LOUDNESS:g}"]
            agreed = before["agrees_with_loud"], after["agrees_with_loud"]
            holds = agreed[1] - agreed[0] <= (1 - agreed[0]) / 2
            scores = ", ".join(
                f"{name.replace('_', ' ')} {100 * before[name]:.1f} -> {100 * after[name]:.1f}" for name in metrics
            )
            told = f"answers that are that expert's own {100 * agreed[0]:.1f} -> {100 * agreed[1]:.1f} %, {scores}"
            verdict = "holds" if holds else "does not hold"
            yield Bar(claim, holds, f"{TITLES[dataset]}, shared heads, iid: {claim}: {told}. **{verdict}**")
