"""Means over targets and seeds with intervals; paired differences of two methods on the same pools and resamples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from records import Group, decoded

from mergestream.bench.analysis.comparison import Estimate
from mergestream.functional.intervals import percentiles
from mergestream.runtime.errors import InputError


@dataclass(frozen=True)
class Where:
    """What a row was measured on, beside its pool and target."""

    stream: str
    condition: str = ""

    @property
    def told(self) -> str:
        return f"{self.stream}, {self.condition}" if self.condition else self.stream


def select(
    groups: Sequence[Group], kind: str, dataset: str, head_init: str, loss: str, *, later: bool = False
) -> list[Group]:
    """Pools of all seeds that were trained alike."""
    wanted = {"kind": kind, "dataset": dataset, "head_init": head_init, "loss": loss, "later": later}
    found = [group for group in groups if all(group[key] == value for key, value in wanted.items())]
    return sorted(found, key=lambda group: group["seed"])


def places(groups: Sequence[Group]) -> list[Where]:
    """All streams and conditions, in the order of the rows."""
    return list(dict.fromkeys(Where(row["stream"], row["condition"]) for group in groups for row in group["rows"]))


def methods(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(row["method"] for group in groups for row in group["rows"]))


def estimate(groups: Sequence[Group], method: str, where: Where, metric: str) -> Estimate | None:
    """The mean over targets and seeds; None where the method is missing at a target. Without resamples no interval."""
    values = [_mean(group, method, where, metric) for group in groups]
    if not values or any(value is None for value in values):
        return None
    return _with_interval([_draws(group, method, where, metric) for group in groups], float(np.mean(values)))


def difference(
    ours: Sequence[Group], our_method: str, theirs: Sequence[Group], their_method: str, where: Where, metric: str
) -> Estimate | None:
    """Ours less theirs, pool by pool on the same resamples. Rows of two pools that only share a name are refused."""
    pairs = paired(ours, theirs)
    gaps, draws = [], []
    for mine, other in pairs:
        values = _mean(mine, our_method, where, metric), _mean(other, their_method, where, metric)
        if values[0] is None or values[1] is None:
            return None
        gaps.append(values[0] - values[1])
        both = _draws(mine, our_method, where, metric), _draws(other, their_method, where, metric)
        draws.append(None if both[0] is None or both[1] is None else both[0] - both[1])
    return _with_interval(draws, float(np.mean(gaps))) if gaps else None


def paired(ours: Sequence[Group], theirs: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Groups of one pool, by its name; that it is one pool is seen by its fingerprint."""
    rivals = {group["pool"]: group for group in theirs}
    found = [(group, rivals[group["pool"]]) for group in ours if group["pool"] in rivals]
    for mine, other in found:
        if mine["fingerprint"] != other["fingerprint"]:
            raise InputError(
                f"The rows of {mine['pool']} in {mine.get('file')} and {other.get('file')} are of two different pools, "
                f"trained in different sessions: they cannot be paired. Run both methods on one of them."
            )
    return found


def _mean(group: Group, method: str, where: Where, metric: str) -> float | None:
    here = [r for r in group["rows"] if (r["stream"], r["condition"]) == (where.stream, where.condition)]
    values = [row[metric] for row in here if row["method"] == method]
    whole = len(values) == len({row["target"] for row in here}) > 0
    return float(np.mean(values)) if whole and all(value is not None for value in values) else None


def _draws(group: Group, method: str, where: Where, metric: str) -> np.ndarray | None:
    coded = group["resamples"].get("|".join((method, where.stream, where.condition)), {}).get(metric)
    return None if coded is None else decoded(coded)


def _with_interval(draws: Sequence[np.ndarray | None], mean: float) -> Estimate:
    known = [each for each in draws if each is not None]
    low, high = percentiles(np.mean(known, axis=0)) if len(known) == len(draws) else (float("nan"),) * 2
    return Estimate(mean, low, high)
