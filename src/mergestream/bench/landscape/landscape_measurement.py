"""Measures a loss landscape: the experts and their mean, the segments between experts, a path, the plane."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
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
from mergestream.bench.landscape.plane import Losses, Plane, Surface, grid_axes
from mergestream.data.datasets.domain_data import DomainData
from mergestream.data.streams import Stream
from mergestream.functional import coefficients as simplex
from mergestream.methods import Method, Step
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError
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
    track: Track = quiet,
    provenance: dict[str, Any] | None = None,
) -> Landscape:
    """Measure the loss of images [N,...] over the plane through three experts (default: the pool's first three).

    `margin` widens the box around all marks, as a share of its longer side.
    """
    whole_number("resolution", resolution, low=2)
    whole_number("batch_size", batch_size, low=1)
    number("margin", margin, low=0)
    yes_or_no("recalibrate_bn", recalibrate_bn)
    workers = 1 if pool.device.type == "cuda" else os.cpu_count() or 1
    plane = Plane.through(pool, pool.names[:3] if experts is None else experts)
    surface = Surface(pool, images, labels, batch_size=batch_size, recalibrate_bn=recalibrate_bn)
    # One thread per network: faster for small networks, and the bits do not depend on the number of cores.
    with cpu_threads(1):
        measurement = _Measurement(plane, surface, workers, track)
        marks, differences = measurement.marks()
        points = measurement.path(path) if path else []
        x, y = grid_axes([*((m.x, m.y) for m in marks), *((p.x, p.y) for p in points)], resolution, margin)
        segments = measurement.segments(np.linspace(0, 1, resolution).tolist())
        grid = measurement.grid(x, y)
    return Landscape(
        measure=ENTROPY if labels is None else CROSS_ENTROPY,
        images=len(images),
        experts=tuple(measurement.names),
        pool=pool.names,
        x=x,
        y=y,
        loss=[[point.mean for point in row] for row in grid],
        accuracy=None if labels is None else [[point.accuracy for point in row] for row in grid],
        marks=marks,
        segments=segments,
        differences=differences,
        path=points,
        path_method=path.method.label() if path else None,
        path_stream=path.stream.name if path else None,
        provenance=provenance or {"pool": pool.fingerprint()},
    )


class _Measurement:
    """Losses of networks on one plane, part by part of the landscape."""

    def __init__(self, plane: Plane, surface: Surface, workers: int, track: Track) -> None:
        self.plane, self.surface, self.workers, self.track = plane, surface, workers, track
        self.pool, self.names = plane.pool, [plane.pool.names[corner] for corner in plane.corners]
        self.experts = [surface.at_weights(self.pool.bank[corner]) for corner in plane.corners]

    def marks(self) -> tuple[list[Mark], list[LossDifference]]:
        """The three experts, their mean, the mean of a larger pool; and the mean minus each expert."""
        places = [(*corner, 0.0) for corner in self.plane.corner_coordinates]
        networks = zip(self.names, places, self.experts, strict=True)
        marks = [Mark(name, EXPERT, *place, own.mean, own.accuracy) for name, place, own in networks]
        three = simplex.uniform(3).tolist()
        mean = self._add_mean(marks, MEAN, dict(zip(self.plane.corners, three, strict=True)))
        if len(self.pool) > 3:
            self._add_mean(marks, POOL_MEAN, dict(enumerate(simplex.uniform(len(self.pool)).tolist())))
        gaps = {n: mean.loss - own.loss for n, own in zip(self.names, self.experts, strict=True) if _finite(mean, own)}
        return marks, [LossDifference(name, *_interval(gap)) for name, gap in gaps.items()]

    def _add_mean(self, marks: list[Mark], kind: str, shares: dict[int, float]) -> Losses:
        weights = self.pool.merge([shares.get(k, 0.0) for k in range(len(self.pool))])
        losses = self.surface.at_weights(weights)
        marks.append(Mark(kind, kind, *self.plane.project(weights), losses.mean, losses.accuracy))
        return losses

    def path(self, streamed: StreamedMethod) -> list[PathPoint]:
        """Every batch's merged model, projected; its loss is on the landscape's images."""
        method, points = streamed.method, list[PathPoint]()
        method.reset()
        with self.track(f"merged models of {method.label()}", len(streamed.stream)) as advance:
            for batch in streamed.stream:
                step = method.step(streamed.data.batch(torch.as_tensor(batch)))
                weights = _merged_weights(method, step)
                losses = self.surface.at_weights(weights)
                a, h = (None if c is None else c.tolist() for c in (step.encoder_coefficients, step.head_coefficients))
                place = self.plane.project(weights)
                points.append(PathPoint(len(points), *place, losses.mean, losses.accuracy, a, h))
                advance()
        return points

    def segments(self, positions: list[float]) -> list[Segment]:
        """The straight lines between every two of the three experts."""
        inner, segments = positions[1:-1], []
        pairs = list(combinations(range(3), 2))
        places = np.array(self.plane.corner_coordinates)
        points = [(1 - t) * places[i] + t * places[j] for i, j in pairs for t in inner]
        losses = self._losses("segments between experts", points)
        for turn, (i, j) in enumerate(pairs):
            own = [self.experts[i], *losses[turn * len(inner) : (turn + 1) * len(inner)], self.experts[j]]
            accuracy = None if own[0].correct is None else [point.accuracy for point in own]
            barrier = barrier_of(positions, [point.loss for point in own]) if _finite(*own) else None
            length, loss = float(np.hypot(*(places[i] - places[j]))), [point.mean for point in own]
            segments.append(Segment(self.names[i], self.names[j], length, positions, loss, accuracy, barrier))
        return segments

    def grid(self, x: Sequence[float], y: Sequence[float]) -> list[list[Losses]]:
        losses = self._losses("plane through the experts", [(a, b) for b in y for a in x])
        return [losses[start : start + len(x)] for start in range(0, len(losses), len(x))]

    def _losses(self, title: str, points: Sequence[Any]) -> list[Losses]:
        """Losses of the blends at points (x, y) of the plane."""
        blends = [self.plane.coefficients(float(x), float(y)) for x, y in points]
        with self.track(title, len(blends)) as advance:
            return self.surface.at_blends(blends, workers=self.workers, on_done=advance)


def _merged_weights(method: Method, step: Step) -> Tensor:
    """The one model [P] that answered a step; refused if there is none."""
    weights = method.merged_weights()
    if weights is not None:
        return weights
    if step.encoder_coefficients is None:
        raise InputError(
            f"'{method.name}' answers with all experts, not with one merged model, so it has no place in a landscape. "
            f"Choose another method, such as entropy_adaptive or mean."
        )
    return method.pool.merge(step.encoder_coefficients, step.head_coefficients)


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
