"""The loss of many networks on the same images: affine blends of the experts, or given weights."""

from collections.abc import Callable, Sequence
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
from mergestream.networks.batchnorm import reestimate
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError


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
