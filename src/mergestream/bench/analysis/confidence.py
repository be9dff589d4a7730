"""Reliability diagrams and risk-coverage curves of methods, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mergestream.bench.analysis.comparison import grouped
from mergestream.bench.records import Run
from mergestream.functional.metrics import risk_coverage

BINS = 10
COVERAGES = np.linspace(0.02, 1, 50)


@dataclass(frozen=True)
class Reliability:
    """One method on one stream, per bin of confidence: mean confidence, accuracy, share of images."""

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


def reliabilities(runs: Sequence[Run], smallest: float = 0.0) -> list[Reliability]:
    """All images of a method's runs on a stream together; bins without images, or a smaller share, are left out."""
    curves = []
    for (label, stream), own in grouped(runs, "label", "stream").items():
        confidence = torch.cat([run.probabilities.amax(dim=-1) for run in own]).numpy().astype(float)
        right = torch.cat([run.predictions == run.labels for run in own]).numpy().astype(float)
        # A confidence on an edge belongs to the bin below, as in torchmetrics' calibration error.
        place = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
        counts = np.bincount(place, minlength=BINS)
        filled = (counts > 0) & (counts / len(place) >= smallest)
        sums = [np.bincount(place, weights=values, minlength=BINS)[filled] for values in (confidence, right)]
        means = [each / counts[filled] for each in sums]
        curves.append(Reliability(label, stream, means[0], means[1], counts[filled] / len(place)))
    return curves


def risk_coverages(runs: Sequence[Run]) -> list[RiskCoverage]:
    """Curves on one grid of coverages: runs are averaged at each target, then targets."""
    curves = []
    for (label, stream), own in grouped(runs, "label", "stream").items():
        means = []
        for at_target in grouped(own, "target").values():
            risks = [risk_coverage(run.probabilities, run.labels) for run in at_target]
            means.append(np.mean([np.interp(COVERAGES, *risk) for risk in risks], axis=0))
        curves.append(RiskCoverage(label, stream, COVERAGES, np.mean(means, axis=0)))
    return curves
