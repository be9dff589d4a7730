"""Sums over the answers of a step that estimates are made from, and the window of a stream's last steps."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

CHUNK_IMAGES, MOST_CHUNKS = 32, 200


@dataclass(frozen=True)
class StepSums:
    """Sums over the images of a step, by calibrated probabilities."""

    images: int
    confidence: float  # of the most probable class, c
    variance: float  # c (1 - c)
    sure: int | None  # images at or above the experts' threshold; None where a card lacks it
    probability: tuple[float, ...]  # [C]
    squares: tuple[float, ...]  # [C], of the probabilities
    set_classes: int | None = None  # classes in the prediction sets

    @classmethod
    def of(cls, probabilities: np.ndarray, threshold: float | None, sets: np.ndarray | None) -> "StepSums":
        """Of probabilities [B,C] and prediction sets [B,C]."""
        confidence = probabilities.max(axis=1)
        return cls(
            len(probabilities),
            float(confidence.sum()),
            float((confidence * (1 - confidence)).sum()),
            None if threshold is None else int((confidence >= threshold).sum()),
            tuple(probabilities.sum(axis=0).tolist()),
            tuple(np.square(probabilities).sum(axis=0).tolist()),
            None if sets is None else int(sets.sum()),
        )


Window = tuple[StepSums, ...]  # chunks of at least CHUNK_IMAGES images, but for the last


def with_step(window: Window, step: StepSums) -> Window:
    """The window with one more step: single images fill chunks, so that it holds as many images as batches do."""
    if window and len(window[-1].probability) != len(step.probability):
        window = ()  # of a pool with other classes
    if window and window[-1].images < CHUNK_IMAGES:
        return (*window[:-1], _sum((window[-1], step)))
    return (*window, step)[-MOST_CHUNKS:]


def total_of(window: Window) -> StepSums | None:
    """The sums over a window; a part that some step lacks is None."""
    return _sum(window) if window else None


def _sum(parts: Sequence[StepSums]) -> StepSums:
    sums: dict[str, Any] = {}
    for each in fields(StepSums):
        values = [getattr(part, each.name) for part in parts]
        if None in values:
            sums[each.name] = None
        else:
            sums[each.name] = tuple(np.sum(values, axis=0).tolist()) if isinstance(values[0], tuple) else sum(values)
    return StepSums(**sums)
