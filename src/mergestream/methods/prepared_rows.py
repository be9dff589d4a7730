"""Experts' rows with what averaging would lose restored: heads of one size, encoders' changes scaled up."""

import torch
from torch import Tensor

from mergestream.functional.merging.rows import Rows
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import PoolError

LITTLE = 0.01  # a smaller loss is not worth one more row
NATURAL = 3.0  # heads of one pool differ in norm by a smaller factor, unless one was tampered with


def even_heads(pool: ExpertPool) -> tuple[Rows, Tensor]:
    """The pool's rows with heads of odd norm brought to the median's, and the factor of each [K]."""
    rows = pool.rows
    sizes = rows.head.float().norm(dim=1)
    median = sizes.median()
    odd = (sizes > NATURAL * median) | (sizes * NATURAL < median)
    factors = torch.where(odd, median / sizes.clamp_min(torch.finfo(torch.float32).tiny), 1.0)
    if not bool(odd.any()):
        return rows, factors
    return Rows(rows.encoder, (rows.head.float() * factors[:, None]).to(rows.head.dtype)), factors


def restored(pool: ExpertPool, rows: Rows) -> tuple[Rows, float]:
    """The rows with the base's encoder as one more, and the factor of the experts' changes.

    Each head reads its own encoder's change. In the mean of K encoders that change is a K-th; the mean head reads the
    others' too, as far as heads point the same way (cosine c): 1 + (K - 1) c of K is left, and its inverse restores it.
    """
    if pool.base is None:
        raise PoolError("restore=True needs the pool's base, from which the experts started; this pool has none.")
    heads = torch.nn.functional.normalize(rows.head.float(), dim=1)
    count = len(heads)
    alike = float((heads @ heads.T).mean())  # the mean over all pairs, each with itself included: (1 + (K-1)c) / K
    scale = 1 / max(alike, 1 / count)
    if scale < 1 + LITTLE:
        return rows, 1.0
    base = pool.base[: rows.encoder.shape[1]].to(rows.encoder)
    return Rows(torch.cat([rows.encoder, base[None]]), rows.head), scale
