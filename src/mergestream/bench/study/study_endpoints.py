"""Differences of two methods from a study's record, by the hierarchical bootstrap, and their verdicts."""

from collections.abc import Sequence

import numpy as np

from mergestream.bench.analysis.duels import MEAN, WORST, Endpoint, endpoint_of
from mergestream.bench.study.study_record import Group, Setting, decoded
from mergestream.functional.nested_bootstrap import PairedDifference, Tree, resample_tree
from mergestream.functional.non_inferiority import MARGINS

RESAMPLES = 1000
UNITS = "groups or images"


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
            noise = _resized(mine[target] - other[target]) - np.mean(gaps)
            streams = [np.concatenate([[gap], gap + noise]) for gap in gaps]
            tree.setdefault(target, {})[group["pool"]] = streams
    return resample_tree(tree, UNITS) if tree else None


def target_draws(group: Group, method: str, at: Setting, metric: str) -> dict[str, np.ndarray]:
    """Draws of one pool by target; none where none were stored."""
    stored = group["resamples"].get(f"{method}|{at.stream}|{at.condition}", {}).get(metric, {})
    return {target: decoded(text) for target, text in stored.items()}


def stream_scores(group: Group, method: str, at: Setting, metric: str) -> dict[tuple[str, int], float]:
    """Scores by target and stream seed."""
    rows = [row for row in group["rows"] if (row["method"], row["stream"], row["condition"]) == (method, *at.words)]
    return {(row["target"], row["stream_seed"]): row[metric] for row in rows if row.get(metric) is not None}


def _resized(draws: np.ndarray) -> np.ndarray:
    """As many as the resamples of targets and seeds: the stored ones in turn."""
    return np.resize(draws, RESAMPLES)
