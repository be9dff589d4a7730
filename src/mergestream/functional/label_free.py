"""Accuracy and prevalence estimated without labels: from confidences, and from thresholds of labelled images at home.

Shapes: N images, C classes. Confidences are calibrated: of the answers given with 0.8, four in five are right.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mergestream.functional.conformal import score_grid

NORMAL_95 = 1.96
FAR = 4.0  # standard errors
FAR_SHARE, FAR_FACTOR = 0.05, 2.0  # a difference that matters: so much of all images, or by this factor


class LabelFreeEstimate(NamedTuple):
    """A number between 0 and 1 with its 95 % interval."""

    value: float
    low: float
    high: float


def expected_accuracy(confidence: float, variance: float, images: int) -> LabelFreeEstimate:
    """The accuracy of N answers from their summed confidence c and the sum of c (1 - c): that of their mean confidence.

    The interval is that of the number of right answers, each right with the chance of its confidence.
    """
    half = (NORMAL_95 * math.sqrt(variance) + 0.5) / images
    value = confidence / images
    return LabelFreeEstimate(value, max(0.0, value - half), min(1.0, value + half))


def accuracy_threshold(confidences: np.ndarray, right: np.ndarray) -> float:
    """The confidence that as many labelled answers [N] stay below as are wrong [N] (ATC, Garg et al. 2022)."""
    wrong = int((~right).sum())
    ordered = np.sort(confidences)
    return float(ordered[wrong]) if wrong < len(ordered) else math.nextafter(float(ordered[-1]), math.inf)


def thresholded_accuracy(sure: int, images: int) -> LabelFreeEstimate:
    """The share of answers at or above the threshold, with Wilson's interval."""
    return LabelFreeEstimate(sure / images, *wilson(sure, images))


def wilson(count: int, total: int) -> tuple[float, float]:
    square = NORMAL_95**2
    middle = (count + square / 2) / (total + square)
    half = NORMAL_95 * math.sqrt(count * (total - count) / total + square / 4) / (total + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_probability(total: float, squares: float, images: int) -> LabelFreeEstimate:
    """The mean probability of a class from its sum and sum of squares over independent images."""
    value = total / images
    half = NORMAL_95 * math.sqrt(max(0.0, squares / images - value**2) / images)
    return LabelFreeEstimate(value, max(0.0, value - half), min(1.0, value + half))


def is_far(observed: float, declared: float, images: int) -> bool:
    """Whether a class's mean probability is far from its declared share: surely, and by an amount that matters."""
    error = math.sqrt(max(declared * (1 - declared), observed * (1 - observed)) / images)
    low, high = sorted((observed, declared))
    matters = high - low >= FAR_SHARE or high >= FAR_FACTOR * low
    # One image more or less is never far.
    return matters and high - low > max(FAR * error, 1 / images)


def validation_summary(probabilities: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    """What a card holds for these estimates, from calibrated probabilities [N,C] and labels [N] of labelled images.

    The threshold of `accuracy_threshold`; by class the number of images and the scores of `score_grid`.
    """
    right = probabilities.argmax(axis=1) == labels
    scores = 1 - probabilities[np.arange(len(labels)), labels]
    own = {name: scores[labels == number] for number, name in enumerate(classes)}
    return {
        "confidence_threshold": accuracy_threshold(probabilities.max(axis=1), right),
        "images": {name: len(values) for name, values in own.items()},
        "scores": {name: score_grid(values) for name, values in own.items()},
    }
