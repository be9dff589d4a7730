"""A loss landscape as a record, and its summary: the plane through three experts, the segments between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mergestream.bench.json_record import JsonRecord

CROSS_ENTROPY, ENTROPY = "cross-entropy", "entropy"
EXPERT, MEAN, POOL_MEAN = "expert", "mean", "pool mean"
Number = float | None  # None where the network's answers were not finite
# A model nearer to the plane than this share of the longest side is in it, up to rounding.
ON_PLANE = 1e-4


@dataclass(frozen=True)
class Mark:
    """A network in the figure: an expert, their mean, or the mean of the whole pool. `distance` is from the plane."""

    name: str
    kind: str  # EXPERT, MEAN or POOL_MEAN
    x: float
    y: float
    distance: float
    loss: Number
    accuracy: Number


@dataclass(frozen=True)
class PathPoint:
    """The merged model of one batch, projected onto the plane; coefficients [K] if the method has them."""

    batch: int
    x: float
    y: float
    distance: float
    loss: Number
    accuracy: Number
    encoder_coefficients: list[float] | None = None
    head_coefficients: list[float] | None = None


@dataclass(frozen=True)
class Barrier:
    """Highest rise of the loss above the straight line between a segment's ends, and its position (0 to 1).

    `low` and `high` are the 95 % interval over images at that position.
    """

    height: float
    at: float
    low: float
    high: float


@dataclass(frozen=True)
class Segment:
    """The straight line of networks from one expert to another, at evenly spaced positions from 0 to 1."""

    start: str
    end: str
    length: float
    positions: list[float]
    loss: list[Number]
    accuracy: list[Number] | None
    barrier: Barrier | None  # None if some loss is not finite

    @property
    def barrier_height(self) -> float:
        return self.barrier.height if self.barrier else 0.0


@dataclass(frozen=True)
class LossDifference:
    """The mean's loss minus an expert's on the same images, with its 95 % interval."""

    expert: str
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Landscape(JsonRecord):
    """`loss[row][column]` belongs to the network at (x[column], y[row]); distances are those of the parameters.

    `measure` is 'cross-entropy' if labels were given, else 'entropy', in nats. `experts` are the three of the plane,
    `pool` all that the path's coefficients refer to.
    """

    kind = "landscape"
    measure: str
    images: int
    experts: tuple[str, ...]
    pool: tuple[str, ...]
    x: list[float]
    y: list[float]
    loss: list[list[Number]]
    accuracy: list[list[Number]] | None
    marks: list[Mark]
    segments: list[Segment]
    differences: list[LossDifference]
    path: list[PathPoint] = field(default_factory=list)
    path_method: str | None = None  # its label
    path_stream: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def path_name(self) -> str | None:
        return f"{self.path_method} on {self.path_stream}" if self.path else None

    @property
    def loss_label(self) -> str:
        return f"{'cross-entropy' if self.measure == CROSS_ENTROPY else 'entropy of the answers'}, nats"

    def of_kind(self, kind: str) -> list[Mark]:
        return [mark for mark in self.marks if mark.kind == kind]


def describe_landscape(landscape: Landscape) -> list[str]:
    """How the mean compares with the experts, the highest barrier, and where the path goes."""
    sentences = [_describe_mean(landscape), _describe_barrier(landscape)]
    sentences += [_describe_path(landscape)] if landscape.path else []
    if landscape.measure == ENTROPY:
        sentences.append("No labels were used: the loss is the entropy of the answers; low means confident, not right.")
    blank = sum(value is None for row in landscape.loss for value in row)
    if blank:
        sentences.append(
            f"{blank} of the {len(landscape.x) * len(landscape.y)} networks of the plane gave no finite answer and are "
            f"left blank. With BatchNorm, try recalibrate_bn."
        )
    return sentences


def _describe_mean(landscape: Landscape) -> str:
    (mean,), experts = landscape.of_kind(MEAN), landscape.of_kind(EXPERT)
    losses = ", ".join(f"{mark.name} {_number(mark.loss)}" for mark in experts)
    differences = landscape.differences
    if len(differences) < len(experts):
        return f"The mean of the three experts, or one of them, gave no finite answer ({losses})."
    groups = {
        "lower than": [d.expert for d in differences if d.high < 0],
        "higher than": [d.expert for d in differences if d.low > 0],
        "not clearly different from": [d.expert for d in differences if d.low <= 0 <= d.high],
    }
    if len(groups["lower than"]) == len(experts):
        place = "is in a valley: lower than every expert"
    elif len(groups["higher than"]) == len(experts):
        place = "is on a ridge: higher than every expert"
    else:
        relations = [f"{relation} {', '.join(names)}" for relation, names in groups.items() if names]
        place = f"is neither in a valley nor on a ridge: {'; '.join(relations)}"
    return f"The mean of the three experts {place} ({landscape.measure} {_number(mean.loss)} nats; {losses})."


def _describe_barrier(landscape: Landscape) -> str:
    barriers = [(segment, segment.barrier) for segment in landscape.segments if segment.barrier is not None]
    if not barriers:
        return "The barriers are unknown: the answers along the segments are not finite."
    segment, barrier = max(barriers, key=lambda pair: pair[1].height)
    if barrier.height <= 0:
        return "There is no barrier: between no two experts does the loss rise above the line between their own."
    unclear = ", which these images do not distinguish from 0" if barrier.low <= 0 else ""
    return (
        f"The highest barrier is {barrier.height:.3f} nats [{barrier.low:.3f}, {barrier.high:.3f}] above the straight "
        f"line, {100 * barrier.at:.0f} % of the way from {segment.start} to {segment.end}{unclear}."
    )


def _describe_path(landscape: Landscape) -> str:
    losses = [point.loss for point in landscape.path if point.loss is not None]
    furthest = max(point.distance for point in landscape.path)
    spread = f"loss {min(losses):.3f} to {max(losses):.3f}" if losses else "no finite loss"
    apart = any(point.encoder_coefficients != point.head_coefficients for point in landscape.path)
    reason = ", since encoder and head have coefficients of their own" if apart else ""
    outside = furthest > ON_PLANE * max(segment.length for segment in landscape.segments)
    place = f"up to {furthest:.3g} off the plane{reason}" if outside else "in the plane"
    return f"{landscape.path_name}: {len(landscape.path)} merged models, {spread}; they are {place}."


def _number(value: Number) -> str:
    return "not finite" if value is None else f"{value:.3f}"
