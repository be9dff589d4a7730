"""Weighted sums of the experts' flat weights: with one coefficient per expert, or one per weight (Fisher)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int]  # start and stop in the flat vector


@dataclass(frozen=True)
class Rows:
    """encoder [K,E] and head [K,H]; both are usually views of one bank [K,E+H]."""

    encoder: Tensor
    head: Tensor

    @classmethod
    def of(cls, bank: Tensor, encoder_size: int) -> "Rows":
        return cls(bank[:, :encoder_size], bank[:, encoder_size:])

    def __len__(self) -> int:
        return len(self.encoder)

    def span(self, start: int, stop: int) -> Tensor:
        """All experts' weights [K,n] from start to stop, which lie both in the encoder or both in the head."""
        border = self.encoder.shape[1]
        if stop <= border:
            return self.encoder[:, start:stop]
        assert start >= border, "a span must not cross from the encoder into the head"
        return self.head[:, start - border : stop - border]

    def segments(self) -> tuple[Span, Span]:
        border = self.encoder.shape[1]
        return (0, border), (border, border + self.head.shape[1])


def chunks_of(spans: Sequence[Span], size: int) -> Iterator[Span]:
    for start, stop in spans:
        for at in range(start, stop, size):
            yield at, min(at + size, stop)


def fill_unseen(
    head: Tensor, classes: Sequence[tuple[slice, int]], seen: Tensor, coefficients: Tensor | None = None
) -> Tensor:
    """Fill the head rows of classes that an expert never saw with the mean of the experts that saw them. head [K,H].

    classes: the spans of the head that belong to one class each. seen [K,C]. coefficients [K]: weights of that mean,
    uniform by default. Any average over all experts is then an average over those that saw the class. A class that no
    expert saw is unchanged.
    """
    filled = head.clone()
    shares = torch.ones(len(head), device=head.device) if coefficients is None else coefficients
    for span, label in classes:
        saw = seen[:, label]
        if bool(saw.all()) or not bool(saw.any()):
            continue
        weights = torch.where(saw, shares, 0.0)
        weights = weights if bool(weights.sum() > 0) else saw.float()
        typical = (weights / weights.sum()) @ head[:, span].float()
        filled[~saw, span] = typical.to(head.dtype)
    return filled


# The output chunk stays in the cache while all K rows pass over it, and is long enough for several threads.
CHUNK = 1 << 21


def weighted_sum(rows: Tensor | Sequence[Tensor], coefficients: Tensor | Sequence[float], out: Tensor) -> Tensor:
    """out = sum_k c_k * rows[k], accumulated in at least fp32. rows [K,P], coefficients [K], out [P].

    A row whose coefficient is exactly 0 is skipped, so that e_k gives row k bit for bit, signs of zero included.
    """
    if out.device.type != "cpu":
        shares = torch.as_tensor(coefficients, device=out.device)
        if isinstance(rows, Tensor) and kernel_can_run(rows, out):
            return kernel_sum(rows, shares, out)
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


BLOCK, WARPS = 4096, 8  # of the kernel


def kernel_sum(rows: Tensor, coefficients: Tensor, out: Tensor) -> Tensor:
    """`weighted_sum` as one GPU kernel: every row is read once, only the result is written.

    Sums in fp32; rows [K,P] may be strided; a row with c_k = 0 is skipped.
    """
    programs = (-(-out.numel() // BLOCK),)
    _kernel()[programs](
        rows, coefficients, out, out.numel(), rows.stride(0), len(rows), BLOCK=BLOCK, num_warps=WARPS
    )  # fmt: skip
    return out


def kernel_can_run(rows: Tensor, out: Tensor) -> bool:
    """Whether the kernel can run: rows with stride 1 in fp32 or a half type, and Triton is installed."""
    return (
        rows.stride(1) == 1
        and out.is_contiguous()
        and rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and _kernel() is not None
    )


@lru_cache(maxsize=1)
def _kernel() -> Any:
    """Compile at first use; None without Triton, which comes with torch's CUDA builds only."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit
    def kernel(rows, coefficients, out, size, stride, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = places < size
        # Adding to -0.0 changes no float, so that e_k gives row k bit for bit.
        total = tl.full((BLOCK,), -0.0, tl.float32)
        for k in range(count):
            share = tl.load(coefficients + k).to(tl.float32)
            row = tl.load(rows + k * stride.to(tl.int64) + places, mask=inside, other=0.0).to(tl.float32)
            total = tl.where(share == 0, total, total + share * row)
        tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)

    return kernel


FISHER_CHUNK = 1 << 17


def fisher_average(
    rows: Rows, information: Sequence[Tensor], scales: Sequence[float], *, floor: float, added: bool, out: Tensor
) -> Tensor:
    """theta = sum_k w_k theta_k / sum_k w_k, element by element, written into out [P].

    information: the diagonal Fisher information [P] of each expert. `added`: w_k = s_k (F_k + floor), as MergeLM and
    FusionBench have it; otherwise w_k = max(s_k F_k, floor), so that weights no answer depends on become the mean.
    """
    for start, stop in chunks_of(rows.segments(), FISHER_CHUNK):
        values = rows.span(start, stop)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        fishers = torch.stack([each[start:stop].to(values.dtype) for each in information])
        scale = torch.tensor(scales, dtype=values.dtype, device=fishers.device)[:, None]
        weights = (fishers + floor) * scale if added else (fishers * scale).clamp_min_(floor)
        # Shares first: the products of tiny weights would underflow.
        shares = weights / weights.sum(dim=0)
        out[start:stop].copy_((shares * values).sum(dim=0))
    return out
