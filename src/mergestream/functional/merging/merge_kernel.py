"""Weighted sum of flat weights as one GPU kernel: every row is read once, only the result is written."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

BLOCK, WARPS = 4096, 8


def weighted_sum(rows: Tensor, coefficients: Tensor, out: Tensor) -> Tensor:
    """out [P] = sum_k c_k * rows[k] in fp32; rows [K,P] may be strided; a row with c_k = 0 is skipped."""
    programs = (-(-out.numel() // BLOCK),)
    _kernel()[programs](
        rows, coefficients, out, out.numel(), rows.stride(0), len(rows), BLOCK=BLOCK, num_warps=WARPS
    )  # fmt: skip
    return out


def can_run(rows: Tensor, out: Tensor) -> bool:
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
