"""Weighted sums of flat weights, in one pass over the memory."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mergestream.functional.merging import fused
from mergestream.functional.merging.rows import Rows

# Small enough that the output chunk stays in the cache while all K rows pass over it, and long enough for threads.
CHUNK = 1 << 21


def weighted_sum(rows: Tensor | Sequence[Tensor], coefficients: Tensor | Sequence[float], out: Tensor) -> Tensor:
    """out = sum_k c_k * rows[k], accumulated in at least fp32. rows [K,P], coefficients [K], out [P].

    A row whose coefficient is exactly 0 takes no part, not even through the sign of zero: e_k gives row k bit for bit.
    """
    if out.device.type == "cpu":
        return _weighted_sum_on_host(rows, coefficients, out)
    shares = torch.as_tensor(coefficients, device=out.device)
    if isinstance(rows, Tensor) and fused.fits(rows, out):
        return fused.weighted_sum(rows, shares, out)
    return _weighted_sum_on_device(rows, shares, out)


def merge(rows: Rows, encoder: Tensor, head: Tensor, out: Tensor) -> Tensor:
    """theta = sum_k a_k theta_k for the encoder, W = sum_k h_k W_k for the head (Eq. 7), written into out [P]."""
    border = rows.encoder.shape[1]
    weighted_sum(rows.encoder, encoder, out[:border])
    weighted_sum(rows.head, head, out[border:])
    return out


def merge_integers(buffers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the experts' integer buffers (BatchNorm's counters), which have no mean, by their maximum."""
    return {name: torch.stack([own[name] for own in buffers]).amax(dim=0) for name in buffers[0]}


def _weighted_sum_on_host(
    rows: Tensor | Sequence[Tensor], coefficients: Tensor | Sequence[float], out: Tensor
) -> Tensor:
    numbers = coefficients.tolist() if isinstance(coefficients, Tensor) else coefficients
    active = [(row, c) for row, c in zip(rows, numbers, strict=True) if c != 0]
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
            # Copied before it is scaled: bf16 times a number would round to bf16 first.
            total.copy_(first[start : start + CHUNK]).mul_(c)
        for row, c in rest:
            total.add_(row[start : start + CHUNK], alpha=c)
        if total is not target:
            target.copy_(total)
    return out


def _weighted_sum_on_device(rows: Tensor | Sequence[Tensor], coefficients: Tensor, out: Tensor) -> Tensor:
    # No host synchronisation. Adding -0.0 is the identity for every float, so absent rows add exactly that.
    accumulator = torch.promote_types(rows[0].dtype, torch.float32)
    absent = torch.full((), -0.0, dtype=accumulator, device=out.device)
    total = torch.full(out.shape, -0.0, dtype=accumulator, device=out.device)
    for row, c in zip(rows, coefficients.to(accumulator), strict=True):
        total += torch.where(c == 0, absent, row.to(accumulator) * c)
    return out.copy_(total)
