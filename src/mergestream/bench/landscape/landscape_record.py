"""A loss landscape as a record, and its summary: the plane through three experts, the segments between them."""

from dataclasses import dataclass, field
from typing import Any

from mergestream.bench.report.page import render_text
from mergestream.runtime.json_record import JsonRecord

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
    def target(self) -> str:
        """The domain of the images; 'the target' where the record does not name it."""
        return str(self.provenance.get("data", {}).get("domain", "the target"))

    @property
    def loss_label(self) -> str:
        return f"{'cross-entropy' if self.measure == CROSS_ENTROPY else 'entropy of the answers'}, nats"

    def of_kind(self, kind: str) -> list[Mark]:
        return [mark for mark in self.marks if mark.kind == kind]


def describe_landscape(landscape: Landscape) -> list[str]:
    """How the mean compares with the experts, the highest barrier, and where the path goes."""
    relations = {
        "lower than": [each.expert for each in landscape.differences if each.high < 0],
        "higher than": [each.expert for each in landscape.differences if each.low > 0],
        "not clearly different from": [each.expert for each in landscape.differences if each.low <= 0 <= each.high],
    }
    finite = [segment for segment in landscape.segments if segment.barrier is not None]
    sentences = render_text(
        "landscape.txt.j2",
        landscape=landscape,
        mean=landscape.of_kind(MEAN)[0],
        experts=landscape.of_kind(EXPERT),
        relations={relation: names for relation, names in relations.items() if names},
        segment=max(finite, key=lambda segment: segment.barrier_height, default=None),
        path_losses=[point.loss for point in landscape.path if point.loss is not None],
        furthest=max((point.distance for point in landscape.path), default=0),
        on_plane=ON_PLANE * max(segment.length for segment in landscape.segments),
        coefficients_differ=any(point.encoder_coefficients != point.head_coefficients for point in landscape.path),
        blank=sum(value is None for row in landscape.loss for value in row),
    )
    return sentences.splitlines()
