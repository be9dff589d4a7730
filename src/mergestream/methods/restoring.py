"""What averaging takes from a pool and can be given back in closed form: a head's size, an encoder's change."""

import torch
from torch import Tensor

from mergestream.functional.merging.rows import Rows
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import PoolError

LITTLE = 0.01  # what is lost below this is not worth one more row
NATURAL = 3.0  # heads of one pool differ in size by less than this, unless something was done to one


def even_heads(pool: ExpertPool) -> tuple[Rows, Tensor]:
    """The pool's rows with heads of unnatural size brought to the median's, and what each was multiplied by [K]."""
    rows = pool.rows
    sizes = rows.head.float().norm(dim=1)
    median = sizes.median()
    odd = (sizes > NATURAL * median) | (sizes * NATURAL < median)
    factors = torch.where(odd, median / sizes.clamp_min(torch.finfo(torch.float32).tiny), 1.0)
    if not bool(odd.any()):
        return rows, factors
    return Rows(rows.encoder, (rows.head.float() * factors[:, None]).to(rows.head.dtype)), factors


def restored(pool: ExpertPool, rows: Rows) -> tuple[Rows, float]:
    """The rows with the base's encoder as one more, and what the experts' changes are to be multiplied by.

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


def last_layers(pool: ExpertPool) -> list[slice]:
    """Where in the flat weights [P] lies what writes the logits: weights and biases of the head with a row a class."""
    head = [entry for entry in pool.layout.entries if entry.start >= pool.layout.encoder_size]
    return [slice(entry.start, entry.stop) for entry in head if entry.shape[:1] == (len(pool.classes),)]


def head_bias(pool: ExpertPool) -> slice | None:
    """Where in the flat weights [P] the last layer's bias lies; None where the head has none."""
    size = (len(pool.classes),)
    found = [entry for entry in pool.layout.entries if entry.start >= pool.layout.encoder_size and entry.shape == size]
    return slice(found[-1].start, found[-1].stop) if found else None
