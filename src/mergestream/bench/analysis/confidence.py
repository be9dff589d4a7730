"""Reliability diagrams and risk-coverage curves of methods, as arrays."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mergestream.bench.analysis.comparison import by_label_and_stream
from mergestream.bench.records import Run
from mergestream.functional.metrics import risk_coverage

BINS = 10
COVERAGES = np.linspace(0.02, 1, 50)


@dataclass(frozen=True)
class Reliability:
    """One method on one stream, per non-empty bin of confidence: mean confidence, accuracy, share of images."""

    label: str
    stream: str
    confidence: np.ndarray  # [bins]
    accuracy: np.ndarray
    share: np.ndarray


@dataclass(frozen=True)
class RiskCoverage:
    """One method on one stream: the error among the most confident share of images, mean over targets."""

    label: str
    stream: str
    coverage: np.ndarray  # [points]
    risk: np.ndarray


def reliabilities(runs: Sequence[Run], bins: int = BINS) -> list[Reliability]:
    """All images of a method's runs on a stream together."""
    return [_reliability(label, stream, group, bins) for (label, stream), group in by_label_and_stream(runs).items()]


def _reliability(label: str, stream: str, runs: Sequence[Run], bins: int) -> Reliability:
    confidence = torch.cat([run.probabilities.amax(dim=-1) for run in runs]).numpy().astype(float)
    right = torch.cat([run.predictions == run.labels for run in runs]).numpy().astype(float)
    # A confidence on an edge belongs to the bin below, as in torchmetrics' calibration error.
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    filled = counts > 0
    means = [
        np.bincount(place, weights=values, minlength=bins)[filled] / counts[filled] for values in (confidence, right)
    ]
    return Reliability(label, stream, means[0], means[1], counts[filled] / len(place))


def risk_coverages(runs: Sequence[Run]) -> list[RiskCoverage]:
    """Curves on one grid of coverages: runs are averaged at each target, then targets."""
    return [_risk_coverage(label, stream, group) for (label, stream), group in by_label_and_stream(runs).items()]


def _risk_coverage(label: str, stream: str, runs: Sequence[Run]) -> RiskCoverage:
    targets: dict[str, list[np.ndarray]] = defaultdict(list)
    for run in runs:
        coverage, risk = risk_coverage(run.probabilities, run.labels)
        targets[run.arguments["data"]["domain"]].append(np.interp(COVERAGES, coverage, risk))
    means = [np.mean(curves, axis=0) for curves in targets.values()]
    return RiskCoverage(label, stream, COVERAGES, np.mean(means, axis=0))
