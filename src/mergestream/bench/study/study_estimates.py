"""Means over targets and seeds with intervals, and paired differences of two methods, from a record's groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.study.results_plan import LOSS
from mergestream.bench.study.study_record import Group, decoded
from mergestream.functional.intervals import percentiles

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
        means = [_mean(group, method, at, metric) for method in (ours, theirs)]
        draws = [_draws(group, method, at, metric) for method in (ours, theirs)]
        gaps.append(
            (
                None if means[0] is None or means[1] is None else means[0] - means[1],
                None if draws[0] is None or draws[1] is None else draws[0] - draws[1],
            )
        )
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
