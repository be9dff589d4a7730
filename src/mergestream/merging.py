"""Pure weight arithmetic on the flat bank [K,P]: encoder segment first, head segment after it."""

import torch
from torch import Tensor

# Small enough that the output chunk stays in a core's cache while all K rows pass over it.
CHUNK = 1 << 17


def weighted_sum(bank: Tensor, coefficients: Tensor, out: Tensor) -> Tensor:
    """out = sum_k c_k * bank[k], accumulated in at least fp32. bank [K,P], coefficients [K], out [P].

    A row whose coefficient is exactly 0 takes no part, not even through the sign of zero: e_k gives row k bit for bit.
    """
    if bank.device.type == "cpu":
        return _weighted_sum_on_host(bank, coefficients, out)
    return _weighted_sum_on_device(bank, coefficients, out)


def merge(bank: Tensor, encoder: Tensor, head: Tensor, encoder_size: int, out: Tensor) -> Tensor:
    """theta = sum_k a_k theta_k for the encoder, W = sum_k h_k W_k for the head (Eq. 7), written into out [P]."""
    weighted_sum(bank[:, :encoder_size], encoder, out[:encoder_size])
    weighted_sum(bank[:, encoder_size:], head, out[encoder_size:])
    return out


def merge_integers(values: list[Tensor]) -> Tensor:
    """Integer buffers (BatchNorm's counters) have no mean: the project's rule is their maximum."""
    return torch.stack(values).amax(dim=0)


def _weighted_sum_on_host(bank: Tensor, coefficients: Tensor, out: Tensor) -> Tensor:
    active = [(row, c) for row, c in zip(bank, coefficients.tolist(), strict=True) if c != 0]
    accumulator = torch.promote_types(bank.dtype, torch.float32)
    scratch = out if out.dtype == accumulator else torch.empty(min(CHUNK, out.numel()), dtype=accumulator)
    for start in range(0, out.numel(), CHUNK):
        target = out[start : start + CHUNK]
        total = target if scratch is out else scratch[: target.numel()]
        (first, c), *rest = active
        # Copied before it is scaled: bf16 times a number would round to bf16 first.
        total.copy_(first[start : start + CHUNK]).mul_(c)
        for row, c in rest:
            total.add_(row[start : start + CHUNK], alpha=c)
        if total is not target:
            target.copy_(total)
    return out


def _weighted_sum_on_device(bank: Tensor, coefficients: Tensor, out: Tensor) -> Tensor:
    # No host synchronisation. Adding -0.0 is the identity for every float, so absent rows add exactly that.
    accumulator = torch.promote_types(bank.dtype, torch.float32)
    absent = torch.full((), -0.0, dtype=accumulator, device=bank.device)
    total = torch.full(out.shape, -0.0, dtype=accumulator, device=bank.device)
    for row, c in zip(bank, coefficients.to(accumulator), strict=True):
        total += torch.where(c == 0, absent, row.to(accumulator) * c)
    return out.copy_(total)
