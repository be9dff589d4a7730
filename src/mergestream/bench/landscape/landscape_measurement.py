"""Measures a loss landscape: the experts and their mean, the segments between experts, a path, the plane."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from torch import Tensor

from mergestream.bench.landscape.landscape_record import (
    CROSS_ENTROPY,
    ENTROPY,
    EXPERT,
    MEAN,
    POOL_MEAN,
    Barrier,
    Landscape,
    LossDifference,
    Mark,
    PathPoint,
    Segment,
)
from mergestream.bench.landscape.path import merged_models
from mergestream.bench.landscape.plane import Plane, grid_axes
from mergestream.bench.landscape.surface import Losses, Surface
from mergestream.data.datasets.domain_data import DomainData
from mergestream.data.stream import Stream
from mergestream.functional import coefficients as simplex
from mergestream.methods import Method
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.option_checks import number, whole_number, yes_or_no
from mergestream.runtime.parallel import Track, quiet
from mergestream.runtime.seeding import cpu_threads

NORMAL_95 = 1.96


@dataclass(frozen=True)
class StreamedMethod:
    """A method over batches of a domain: its merged models are the path."""

    method: Method
    data: DomainData
    stream: Stream


def measure_landscape(
    pool: ExpertPool,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    experts: Sequence[str] | None = None,
    resolution: int = 21,
    margin: float = 0.2,
    batch_size: int = 128,
    recalibrate_bn: bool = False,
    path: StreamedMethod | None = None,
    workers: int | None = None,
    track: Track = quiet,
    provenance: dict[str, Any] | None = None,
) -> Landscape:
    """Measure the loss of images [N,...] over the plane through three experts (default: the pool's first three).

    `margin` widens the box around all marks, as a share of its longer side. `workers` are threads, one per core.
    """
    whole_number("resolution", resolution, low=2)
    whole_number("batch_size", batch_size, low=1)
    number("margin", margin, low=0)
    yes_or_no("recalibrate_bn", recalibrate_bn)
    plane = Plane.through(pool, pool.names[:3] if experts is None else experts)
    surface = Surface(pool, images, labels, batch_size=batch_size, recalibrate_bn=recalibrate_bn)
    measurement = _Measurement(plane, surface, _workers(workers, pool), track)
    # One thread per network: faster for small networks, and the bits do not depend on the number of cores.
    with cpu_threads(1):
        marks, differences = measurement.marks()
        walked = measurement.path(path) if path else []
        places = [(mark.x, mark.y) for mark in marks] + [(point.x, point.y) for point in walked]
        x, y = grid_axes(places, resolution, margin)
        segments = measurement.segments(np.linspace(0, 1, resolution).tolist())
        grid = measurement.grid(x, y)
    return Landscape(
        measure=ENTROPY if labels is None else CROSS_ENTROPY,
        images=len(images),
        experts=tuple(pool.names[corner] for corner in plane.corners),
        pool=pool.names,
        x=x,
        y=y,
        loss=[[point.mean for point in row] for row in grid],
        accuracy=None if labels is None else [[point.accuracy for point in row] for row in grid],
        marks=marks,
        segments=segments,
        differences=differences,
        path=walked,
        path_method=path.method.label() if path else None,
        path_stream=path.stream.name if path else None,
        provenance=provenance or {"pool": pool.fingerprint()},
    )


def _workers(workers: int | None, pool: ExpertPool) -> int:
    if workers is not None:
        return whole_number("workers", workers, low=1)
    return 1 if pool.device.type == "cuda" else os.cpu_count() or 1


class _Measurement:
    """Losses of networks on one plane, part by part of the landscape."""

    def __init__(self, plane: Plane, surface: Surface, workers: int, track: Track) -> None:
        self.plane, self.surface, self.workers, self.track = plane, surface, workers, track
        self.pool, self.names = plane.pool, [plane.pool.names[corner] for corner in plane.corners]

    def losses(self, title: str, blends: Sequence[Sequence[float]]) -> list[Losses]:
        with self.track(title, len(blends)) as advance:
            return self.surface.at_blends(blends, workers=self.workers, on_done=advance)

    def marks(self) -> tuple[list[Mark], list[LossDifference]]:
        """The three experts, their mean, the mean of a larger pool; and the mean minus each expert."""
        places = self.plane.corner_coordinates
        self.experts = [self.surface.at_weights(self.pool.bank[corner]) for corner in self.plane.corners]
        marks = [
            _mark(name, EXPERT, (*place, 0.0), losses)
            for name, place, losses in zip(self.names, places, self.experts, strict=True)
        ]
        three = simplex.uniform(3).tolist()
        mean = self._add_mean(marks, MEAN, dict(zip(self.plane.corners, three, strict=True)))
        if len(self.pool) > 3:
            self._add_mean(marks, POOL_MEAN, dict(enumerate(simplex.uniform(len(self.pool)).tolist())))
        against = zip(self.names, self.experts, strict=True)
        gaps = [(name, mean.loss - own.loss) for name, own in against if _finite(mean, own)]
        return marks, [LossDifference(name, *_interval(gap)) for name, gap in gaps]

    def _add_mean(self, marks: list[Mark], kind: str, shares: dict[int, float]) -> Losses:
        weights = self.pool.merge([shares.get(k, 0.0) for k in range(len(self.pool))])
        losses = self.surface.at_weights(weights)
        marks.append(_mark(kind, kind, self.plane.project(weights), losses))
        return losses

    def path(self, streamed: StreamedMethod) -> list[PathPoint]:
        """Every batch's merged model, projected; its loss is on the landscape's images."""
        points: list[PathPoint] = []
        with self.track(f"merged models of {streamed.method.label()}", len(streamed.stream)) as advance:
            for step, weights in merged_models(streamed.method, streamed.data, streamed.stream):
                losses = self.surface.at_weights(weights)
                a, h = (None if c is None else c.tolist() for c in (step.encoder_coefficients, step.head_coefficients))
                place = self.plane.project(weights)
                points.append(PathPoint(len(points), *place, losses.mean, losses.accuracy, a, h))
                advance()
        return points

    def segments(self, positions: list[float]) -> list[Segment]:
        """The straight lines between every two of the three experts."""
        pairs = list(combinations(range(3), 2))
        inner = positions[1:-1]
        places = self.plane.corner_coordinates
        points = [_between(places[i], places[j], t) for i, j in pairs for t in inner]
        losses = self.losses("segments between experts", [self.plane.coefficients(*point) for point in points])
        segments = []
        for turn, (i, j) in enumerate(pairs):
            own = [self.experts[i], *losses[turn * len(inner) : (turn + 1) * len(inner)], self.experts[j]]
            length = float(np.hypot(*np.subtract(places[i], places[j])))
            segments.append(_segment(self.names[i], self.names[j], length, positions, own))
        return segments

    def grid(self, x: Sequence[float], y: Sequence[float]) -> list[list[Losses]]:
        losses = self.losses("plane through the experts", [self.plane.coefficients(a, b) for b in y for a in x])
        return [losses[start : start + len(x)] for start in range(0, len(losses), len(x))]


def _mark(name: str, kind: str, place: tuple[float, float, float], losses: Losses) -> Mark:
    return Mark(name, kind, *place, losses.mean, losses.accuracy)


def _between(start: tuple[float, float], end: tuple[float, float], t: float) -> tuple[float, float]:
    return (1 - t) * start[0] + t * end[0], (1 - t) * start[1] + t * end[1]


def _segment(start: str, end: str, length: float, positions: list[float], losses: list[Losses]) -> Segment:
    accuracy = None if losses[0].correct is None else [point.accuracy for point in losses]
    barrier = barrier_of(positions, [point.loss for point in losses]) if _finite(*losses) else None
    return Segment(start, end, length, positions, [point.mean for point in losses], accuracy, barrier)


def barrier_of(positions: Sequence[float], losses: Sequence[np.ndarray]) -> Barrier:
    """Highest rise above the straight line between the ends, from every image's loss [N] at every position."""
    first, last = losses[0], losses[-1]
    rises = [loss - ((1 - t) * first + t * last) for t, loss in zip(positions, losses, strict=True)]
    # The ends are on the line; a rounding error there is not a barrier.
    rises[0] = rises[-1] = np.zeros_like(first)
    highest = int(np.argmax([rise.mean() for rise in rises]))
    height, low, high = _interval(rises[highest])
    return Barrier(height, positions[highest], low, high)


def _interval(differences: np.ndarray) -> tuple[float, float, float]:
    """The mean over images and its 95 % interval."""
    mean = float(differences.mean())
    half = NORMAL_95 * float(differences.std(ddof=1)) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return mean, mean - half, mean + half


def _finite(*losses: Losses) -> bool:
    return all(each.mean is not None for each in losses)
