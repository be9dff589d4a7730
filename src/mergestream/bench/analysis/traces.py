"""Coefficients, entropies and accuracy of a finished run, batch by batch, with their change points."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mergestream.bench.records import Run
from mergestream.functional.coefficients import effective_number
from mergestream.runtime.errors import InputError

# Fewest batches of a level: with fewer, one odd batch at either end would be a level of its own.
SHORTEST = 5


def change_points(series: np.ndarray) -> tuple[int, ...]:
    """Rows at which a new level of series [T,D] begins, in order.

    A segment is split where that raises twice the Gaussian log-likelihood most, as long as the rise exceeds
    (D + 1) * log T, BIC's penalty for D means and a position. Columns are whitened first by the spread of the first
    differences, to which a shift of level adds one term only. Independent noise is assumed, and gives a false alarm in
    at most about 7 streams of 100 (12 to 100 batches, 1 to 6 columns; measured in a test). Drifting noise gives more.
    """
    values = _whitened(np.asarray(series, dtype=float))
    if len(values) < 2 * SHORTEST or not values.shape[1]:
        return ()
    penalty = (values.shape[1] + 1) * np.log(len(values))
    changes: list[int] = []
    waiting = [(0, len(values))]
    while waiting:
        start, stop = waiting.pop()
        place, rise = best_split(values[start:stop], SHORTEST)
        if rise > penalty:
            changes.append(start + place)
            waiting += [(start, start + place), (start + place, stop)]
    return tuple(sorted(changes))


def best_split(values: np.ndarray, shortest: int) -> tuple[int, float]:
    """The place whose two sides' means [D] differ most, and twice the rise of the log-likelihood at unit variance."""
    count = len(values)
    places = np.arange(shortest, count - shortest + 1)
    if not len(places):
        return 0, 0.0
    left = np.cumsum(values, axis=0)[places - 1]
    right = values.sum(axis=0) - left
    gaps = left / places[:, None] - right / (count - places)[:, None]
    rises = places * (count - places) / count * (gaps**2).sum(axis=1)
    best = int(rises.argmax())
    return int(places[best]), float(rises[best])


def _whitened(series: np.ndarray) -> np.ndarray:
    """Scale to columns of unit, uncorrelated noise [T,<=D]; constant directions are left out.

    Differences of neighbours overlap, so T - 1 of them are worth 2/3 (T - 1) independent rows; the inverse of so small
    a sample's covariance is too large by a known factor, which is removed.
    """
    if len(series) < 2:
        return series[:, :0]
    steps = np.diff(series, axis=0)
    spread, directions = np.linalg.eigh(steps.T @ steps / (2 * len(steps)))
    moving = spread > 1e-9 * max(float(spread.max()), 1e-30)
    rows, columns = 2 / 3 * len(steps), int(moving.sum())
    if rows <= columns + 1:
        return series[:, :0]
    inflated = rows / (rows - columns - 1)
    return series @ directions[:, moving] / np.sqrt(spread[moving] * inflated)


@dataclass(frozen=True)
class Trace:
    """One run over its T batches and K experts; None for what the method does not record, NaN for unscored batches.

    Change points are batches, counted from 0, at which a new level begins.
    """

    run: Run
    encoder_coefficients: np.ndarray | None  # [T,K]
    head_coefficients: np.ndarray | None  # [T,K]
    entropy: np.ndarray | None  # [T,K], nats
    accuracy: np.ndarray | None  # [T], 0 to 1
    running_accuracy: np.ndarray | None  # [T], of all images up to each batch
    effective_encoder: np.ndarray | None  # [T], 1 to K
    effective_head: np.ndarray | None  # [T], 1 to K
    coefficient_changes: tuple[int, ...]
    entropy_changes: tuple[int, ...]

    @property
    def experts(self) -> list[str]:
        return list(self.run.arguments["pool"]["experts"])


def trace_of(run: Run) -> Trace:
    """The steps of a run as arrays. Labels below 0 are unknown; accuracy counts only images with a label."""
    count = len(run.arguments["pool"]["experts"])
    encoder, head, entropy = (
        _column(run.steps, key, count) for key in ("encoder_coefficients", "head_coefficients", "entropy")
    )
    momentum = run.arguments.get("options", {}).get("momentum", 0.0)
    # Between two scorings of the experts the merged model does not change; those batches are skipped.
    scored = np.arange(len(run.steps)) if entropy is None else np.flatnonzero(np.isfinite(entropy).all(axis=1))
    effective = _effective(encoder), _effective(head)
    changes = _changes(encoder, scored, momentum), _changes(entropy, scored)
    return Trace(run, encoder, head, entropy, *_accuracies(run), *effective, *changes)


def unsmoothed(coefficients: np.ndarray, momentum: float) -> np.ndarray:
    """Undo the moving average from 1/K: each batch's own coefficients [T,K]. An average would look like drift."""
    if momentum == 0:
        return coefficients
    before = np.vstack([np.full((1, coefficients.shape[1]), 1 / coefficients.shape[1]), coefficients[:-1]])
    return (coefficients - momentum * before) / (1 - momentum)


def _column(steps: Sequence[dict[str, Any]], key: str, count: int) -> np.ndarray | None:
    """One key of all steps [T,K]; unscored batches are NaN."""
    rows = [step.get(key) for step in steps]
    if all(row is None for row in rows):
        return None
    for number, row in enumerate(rows):
        if row is not None and len(row) != count:
            raise InputError(
                f"Step {number} of this run has {len(row)} numbers under '{key}', but its pool has {count} experts. "
                f"The run is damaged: delete it and run it again."
            )
    return np.array([[np.nan] * count if row is None else row for row in rows], dtype=float)


def _accuracies(run: Run) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Share of right answers among labelled images: in each batch [T], and in all batches up to it [T]."""
    labelled = (run.labels >= 0).numpy()
    if len(labelled) != len(run.predictions) or not labelled.any():
        return None, None
    batch = np.repeat(np.arange(len(run.batches)), [len(each) for each in run.batches])
    right = (run.labels == run.predictions).numpy() & labelled
    hits, images = (np.bincount(batch[mask], minlength=len(run.batches)) for mask in (right, labelled))
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN
        return hits / images, hits.cumsum() / images.cumsum()


def _effective(coefficients: np.ndarray | None) -> np.ndarray | None:
    return None if coefficients is None else effective_number(torch.from_numpy(coefficients)).numpy()


def _changes(series: np.ndarray | None, scored: np.ndarray, momentum: float = 0.0) -> tuple[int, ...]:
    """Change points among the scored batches, counted in all batches."""
    if series is None:
        return ()
    return tuple(int(scored[place]) for place in change_points(unsmoothed(series[scored], momentum)))
