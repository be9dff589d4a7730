"""Fisher-weighted averaging (Matena and Raffel 2022): each weight by how much each expert's answers depend on it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mergestream.functional.merging.rows import Rows

CHUNK = 1 << 17


def fisher_average(
    rows: Rows, information: Sequence[Tensor], scales: Sequence[float], *, floor: float, added: bool, out: Tensor
) -> Tensor:
    """theta = sum_k w_k theta_k / sum_k w_k, element by element, written into out [P].

    information: the diagonal Fisher information [P] of each expert. `added`: w_k = s_k (F_k + floor), as MergeLM and
    FusionBench have it; otherwise w_k = max(s_k F_k, floor), so that weights no answer depends on become the mean.
    """
    for begin, end in rows.segments():
        for start in range(begin, end, CHUNK):
            stop = min(start + CHUNK, end)
            values = rows.span(start, stop)
            values = values.to(torch.promote_types(values.dtype, torch.float32))
            fishers = torch.stack([each[start:stop].to(values.dtype) for each in information])
            scale = torch.tensor(scales, dtype=values.dtype, device=fishers.device)[:, None]
            weights = (fishers + floor) * scale if added else (fishers * scale).clamp_min_(floor)
            # Shares first: the products of tiny weights would underflow.
            shares = weights / weights.sum(dim=0)
            out[start:stop].copy_((shares * values).sum(dim=0))
    return out
