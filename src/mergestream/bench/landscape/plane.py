"""The plane through three experts: its coordinates, and the loss of the networks on it."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import local

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mergestream.functional import merging
from mergestream.functional import scores as scoring
from mergestream.networks.architecture import logits_of
from mergestream.networks.layers import reestimate
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, PoolError, some

# Numbers of a row that are widened to fp64 at a time.
CHUNK = 1 << 20
# A triangle flatter than this, height by longest side, is a line as far as fp32 weights can tell.
FLAT = 1e-4


@dataclass(frozen=True)
class Plane:
    """The first expert is the origin, the second is on the x axis, the third above it.

    Distances are those of the parameters: BatchNorm statistics follow the coefficients but do not count as distance,
    since they are in other units.
    """

    pool: ExpertPool
    corners: tuple[int, int, int]
    second: float  # x of the second expert
    third: tuple[float, float]  # x, y of the third

    @classmethod
    def through(cls, pool: ExpertPool, names: Sequence[str]) -> "Plane":
        """The plane through three experts by name; refused if they are not three or are on one line."""
        if len(names) != 3 or len(set(names)) != 3:
            raise InputError(
                f"A plane goes through three different experts; got {', '.join(names) or 'none'}. Name three of: "
                f"{some(pool.names)}."
            )
        corners = (pool.index(names[0]), pool.index(names[1]), pool.index(names[2]))
        gram = np.zeros((2, 2))  # inner products of the edges from the first expert, in fp64
        for a, b, c in _chunks(pool, [pool.bank[corner] for corner in corners]):
            edges = torch.stack([b - a, c - a])
            gram += (edges @ edges.T).cpu().numpy()
        (first, both), (_, last) = gram.tolist()
        longest = math.sqrt(max(first, last, first + last - 2 * both))
        second = math.sqrt(first)
        along = both / second if second > 0 else 0.0
        height = math.sqrt(max(last - along**2, 0.0))
        if second <= FLAT * longest or height <= FLAT * longest:
            raise PoolError(
                f"The experts {', '.join(names)} are on one line (two may be the same, or one a blend of the others), "
                f"so no plane goes through them. Name three others of: {some(pool.names)}."
            )
        return cls(pool, corners, second, (along, height))

    def coefficients(self, x: float, y: float) -> list[float]:
        """Affine coefficients [K] of the network at (x, y): they sum to 1, and an expert's own are exactly e_k."""
        third = y / self.third[1]
        second = (x - third * self.third[0]) / self.second
        coefficients = [0.0] * len(self.pool)
        for corner, share in zip(self.corners, (1 - second - third, second, third), strict=True):
            coefficients[corner] = share
        return coefficients

    @property
    def corner_coordinates(self) -> list[tuple[float, float]]:
        return [(0.0, 0.0), (self.second, 0.0), self.third]

    def project(self, weights: Tensor) -> tuple[float, float, float]:
        """(x, y) of the nearest point of the plane to weights [P], and their distance from the plane."""
        first, second = 0.0, 0.0
        rows = [*(self.pool.bank[corner] for corner in self.corners), weights]
        for a, b, c, point in _chunks(self.pool, rows):
            first += float((point - a) @ (b - a))
            second += float((point - a) @ (c - a))
        x = first / self.second
        y = (second - x * self.third[0]) / self.third[1]
        shares = [self.coefficients(x, y)[corner] for corner in self.corners]
        left = 0.0
        for *experts, point in _chunks(self.pool, rows):
            # Squares of differences, not a difference of squares, whose rounding would hide a distance of 0.
            left += float((point - sum(s * e for s, e in zip(shares, experts, strict=True))).square().sum())
        return x, y, math.sqrt(left)


def grid_axes(points: Sequence[tuple[float, float]], resolution: int, margin: float) -> tuple[list[float], list[float]]:
    """Evenly spaced x and y over the box of all points, widened on each side by a share of its longer one."""
    low, high = np.min(points, axis=0), np.max(points, axis=0)
    room = margin * float((high - low).max())
    x, y = (np.linspace(low[axis] - room, high[axis] + room, resolution).tolist() for axis in (0, 1))
    return x, y


def _chunks(pool: ExpertPool, rows: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters of several rows [P] side by side in fp64, some at a time; floating buffers are left out."""
    buffers = pool.layout.buffers
    for start, stop in ((0, buffers.start), (buffers.stop, pool.layout.size)):
        for begin in range(start, stop, CHUNK):
            end = min(begin + CHUNK, stop)
            yield [row[begin:end].double() for row in rows]


@dataclass(frozen=True)
class Losses:
    """Per image: the loss [N], NaN if the answer was not finite, and whether it was right [N] if labels exist."""

    loss: np.ndarray
    correct: np.ndarray | None

    @property
    def mean(self) -> float | None:
        return float(self.loss.mean()) if np.isfinite(self.loss).all() else None

    @property
    def accuracy(self) -> float | None:
        return None if self.correct is None or self.mean is None else float(self.correct.mean())


class Surface:
    """Target images, prepared once. The loss is the cross-entropy if labels [N] are given, else the entropy, in nats.

    BatchNorm statistics are blended by the encoder's coefficients, as everywhere; `recalibrate_bn` re-estimates them
    from every batch instead.
    """

    def __init__(
        self, pool: ExpertPool, images: Tensor, labels: Tensor | None, *, batch_size: int, recalibrate_bn: bool
    ) -> None:
        if labels is not None and labels.shape != (len(images),):
            raise InputError(f"{len(images)} images need as many labels, got shape {tuple(labels.shape)}.")
        if len(images) < 2:
            raise InputError(f"A landscape needs at least two images of the target, got {len(images)}.")
        self.pool, self.recalibrate_bn = pool, recalibrate_bn
        self.batches = [pool.prepare(batch) for batch in images.split(batch_size)]
        self.labels = None if labels is None else labels.to(pool.device).split(batch_size)

    @torch.no_grad()
    def at_weights(self, weights: Tensor, pool: ExpertPool | None = None) -> Losses:
        """Losses of flat weights [P]; `pool` may be another thread's copy."""
        pool = pool or self.pool
        if self.recalibrate_bn:
            weights = weights.clone()  # re-estimation writes into them
        losses, hits = [], []
        for number, batch in enumerate(self.batches):
            logits = self._logits(pool, weights, batch)
            if self.labels is None:
                losses.append(scoring.entropy(logits.unsqueeze(1)))
            else:
                losses.append(F.cross_entropy(logits, self.labels[number], reduction="none"))
                hits.append(logits.argmax(dim=-1) == self.labels[number])
        loss = torch.cat(losses).double().cpu().numpy()
        return Losses(loss, torch.cat(hits).cpu().numpy() if hits else None)

    def _logits(self, pool: ExpertPool, weights: Tensor, batch: Tensor) -> Tensor:
        # Not pool.forward: far outside the experts a network may overflow, which is a hole in the figure, not an error.
        module = pool.module_with(weights)
        with pool.input_errors(batch):
            if self.recalibrate_bn:
                reestimate(module, batch)
            logits = logits_of(module(batch)).float()
        finite = torch.isfinite(logits).all(dim=-1, keepdim=True)
        return torch.where(finite, logits, torch.nan)

    def at_blends(
        self, blends: Sequence[Sequence[float]], *, workers: int, on_done: Callable[[], None]
    ) -> list[Losses]:
        """Losses of affine blends of the experts, coefficients [n][K]; each thread has a network of its own.

        One thread computes a whole blend, so that the bits do not depend on the number of threads.
        """
        own = local()

        def losses(blend: Sequence[float]) -> Losses:
            if not hasattr(own, "pool"):
                own.pool = self.pool.to(self.pool.device)
                own.weights = own.pool.new_weights()
            coefficients = torch.tensor(blend, dtype=torch.float64, device=own.pool.device)
            measured = self.at_weights(merging.merge(own.pool.rows, coefficients, coefficients, own.weights), own.pool)
            on_done()
            return measured

        with ThreadPoolExecutor(workers) as threads:
            return list(threads.map(losses, blends))
