"""The weighted sum of flat weights in one pass over memory: on the CPU, as a GPU kernel, or by torch operations."""

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor

from mergestream.functional.merging import merge_kernel
from mergestream.functional.merging.rows import Rows

# The output chunk stays in the cache while all K rows pass over it, and is long enough for several threads.
CHUNK = 1 << 21


def weighted_sum(rows: Tensor | Sequence[Tensor], coefficients: Tensor | Sequence[float], out: Tensor) -> Tensor:
    """out = sum_k c_k * rows[k], accumulated in at least fp32. rows [K,P], coefficients [K], out [P].

    A row whose coefficient is exactly 0 is skipped, so that e_k gives row k bit for bit, signs of zero included.
    """
    if out.device.type != "cpu":
        shares = torch.as_tensor(coefficients, device=out.device)
        if isinstance(rows, Tensor) and merge_kernel.can_run(rows, out):
            return merge_kernel.weighted_sum(rows, shares, out)
        return _sum_on_device(rows, shares, out)
    numbers = coefficients.tolist() if isinstance(coefficients, Tensor) else coefficients
    active = list(compress(zip(rows, numbers, strict=True), numbers))
    if not active:
        return out.zero_()
    accumulator = torch.promote_types(active[0][0].dtype, torch.float32)
    scratch = out if out.dtype == accumulator else torch.empty(min(CHUNK, out.numel()), dtype=accumulator)
    for start in range(0, out.numel(), CHUNK):
        target = out[start : start + CHUNK]
        total = target if scratch is out else scratch[: target.numel()]
        (first, c), *rest = active
        if first.dtype == accumulator:
            torch.mul(first[start : start + CHUNK], c, out=total)
        else:
            # Copy before scaling: bf16 times a number would be rounded to bf16.
            total.copy_(first[start : start + CHUNK]).mul_(c)
        for row, c in rest:
            total.add_(row[start : start + CHUNK], alpha=c)
        if total is not target:
            target.copy_(total)
    return out


def merge(rows: Rows, encoder: Tensor, head: Tensor, out: Tensor) -> Tensor:
    """Write theta = sum_k a_k theta_k (encoder) and W = sum_k h_k W_k (head) into out [P] (Eq. 7)."""
    border = rows.encoder.shape[1]
    weighted_sum(rows.encoder, encoder, out[:border])
    weighted_sum(rows.head, head, out[border:])
    return out


def merge_integers(buffers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the experts' integer buffers (BatchNorm's counters), which have no mean, by their maximum."""
    return {name: torch.stack([own[name] for own in buffers]).amax(dim=0) for name in buffers[0]}


def _sum_on_device(rows: Tensor | Sequence[Tensor], coefficients: Tensor, out: Tensor) -> Tensor:
    # No host synchronisation: skipped rows add -0.0, which changes no float.
    accumulator = torch.promote_types(rows[0].dtype, torch.float32)
    absent = torch.full((), -0.0, dtype=accumulator, device=out.device)
    total = torch.full(out.shape, -0.0, dtype=accumulator, device=out.device)
    for row, c in zip(rows, coefficients.to(accumulator), strict=True):
        total += torch.where(c == 0, absent, row.to(accumulator) * c)
    return out.copy_(total)
