"""Triton kernels of a transformer block's small work: norms with a sum beside them, and attention among few tokens."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

ROWS, WARPS = 2, 2
FEW_TOKENS = 64


def available() -> bool:
    """Whether there is a compiler for them: Triton comes with torch's CUDA builds only."""
    return _kernels() is not None


def norm_and_keep(x: Tensor, weight: Tensor, shift: Tensor, eps: float, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The layer norm of x [T,C], and x + bias: one reading of x, two writings, sums in fp32."""
    rows, width = x.shape
    normed, kept = torch.empty_like(x), torch.empty_like(x)
    block = 1 << (width - 1).bit_length()
    programs = (-(-rows // ROWS),)
    _kernels()[0][programs](
        x, weight, shift, bias, normed, kept, rows, width, eps, ROWS=ROWS, BLOCK=block, num_warps=WARPS
    )  # fmt: skip
    return normed, kept


def short(query: Tensor) -> bool:
    """Whether attention is among so few tokens [B,H,N,D] that one program holds an image's head whole."""
    return query.shape[2] <= FEW_TOKENS and query.shape[3] in (32, 64) and query.is_cuda


def short_attention(parts: Tensor, images: int, heads: int) -> Tensor:
    """Attention [B·N,H·D] of queries, keys and values as they lie in one product's answer [B·N,3·H·D]."""
    tokens, width = len(parts) // images, parts.shape[1] // (3 * heads)
    mixed = torch.empty(len(parts), heads * width, dtype=parts.dtype, device=parts.device)
    block = max(16, 1 << (tokens - 1).bit_length())
    _kernels()[1][(images, heads)](
        parts, mixed, tokens, heads, width**-0.5, WIDTH=width, BLOCK=block, num_warps=4
    )  # fmt: skip
    return mixed


@lru_cache(maxsize=1)
def _kernels() -> Any:
    """Compiled at their first use."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit
    def norm_kernel(x, weight, shift, bias, normed, kept, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        real = column < width
        inside = (row < rows) & real
        place = row.to(tl.int64) * width + column
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(value, axis=1)[:, None] / width
        centred = tl.where(inside, value - mean, 0.0)
        spread = tl.sum(centred * centred, axis=1)[:, None] / width
        scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
        moved = tl.load(shift + column, mask=real, other=0.0).to(tl.float32)
        added = tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
        answer = centred * tl.rsqrt(spread + eps) * scale + moved
        tl.store(normed + place, answer.to(normed.dtype.element_ty), mask=inside)
        tl.store(kept + place, (value + added).to(kept.dtype.element_ty), mask=inside)

    @triton.jit
    def attention_kernel(parts, mixed, tokens, heads, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
        image, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        token, feature = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        real = token < tokens
        stride = heads * WIDTH
        place = (image * tokens + token)[:, None] * (3 * stride) + head * WIDTH + feature[None, :]
        query = tl.load(parts + place, mask=real[:, None], other=0.0)
        key = tl.load(parts + place + stride, mask=real[:, None], other=0.0)
        value = tl.load(parts + place + 2 * stride, mask=real[:, None], other=0.0)
        likeness = tl.dot(query, tl.trans(key)) * scale
        likeness = tl.where(real[None, :], likeness, float("-inf"))
        share = tl.exp(likeness - tl.max(likeness, axis=1)[:, None])
        share = share / tl.sum(share, axis=1)[:, None]
        answer = tl.dot(share.to(value.dtype), value)
        out = (image * tokens + token)[:, None] * stride + head * WIDTH + feature[None, :]
        tl.store(mixed + out, answer.to(mixed.dtype.element_ty), mask=real[:, None])

    return norm_kernel, attention_kernel
