"""Pixels as a network reads them, in one GPU kernel: each channel has only 256 levels, so a table holds the answers."""

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from mergestream.networks.preprocessing import Preprocessing

BLOCK, WARPS = 2048, 4


def looked_up(images: Tensor, preprocessing: Preprocessing | None, dtype: torch.dtype) -> Tensor | None:
    """uint8 [B,c,H,W] on a GPU as `network_input` prepares them; None where they must be resized, or have no kernel."""
    if preprocessing is None or images.dtype != torch.uint8 or not images.is_cuda or _kernel() is None:
        return None
    channels = len(preprocessing.mean)
    if images.shape[1:] != (channels, *preprocessing.size):
        return None
    return by_table(images, _table(preprocessing, images.device, dtype))


def by_table(images: Tensor, table: Tensor) -> Tensor:
    """The numbers that a table [c,256] has for pixels [B,c,H,W]."""
    result = torch.empty(images.shape, dtype=table.dtype, device=images.device)
    size, channels = images.shape[2] * images.shape[3], images.shape[1]
    programs = (len(images) * channels, -(-size // BLOCK))
    _kernel()[programs](images.contiguous(), table, result, size, channels, BLOCK=BLOCK, num_warps=WARPS)
    return result


@cache  # and never less: graphs read these tensors
def _table(preprocessing: Preprocessing, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        levels = torch.arange(256, device=device).to(torch.float32) / 255
        return preprocessing.normalised(levels.expand(1, 1, 256)).flatten(1).to(dtype)


@lru_cache(maxsize=1)
def _kernel() -> Any:
    """Compile at first use; None without Triton, which comes with torch's CUDA builds only."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit
    def kernel(images, table, result, size, channels, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
        plane, pixel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place, inside = plane.to(tl.int64) * size + pixel, pixel < size
        level = tl.load(images + place, mask=inside, other=0).to(tl.int32)
        value = tl.load(table + (plane % channels) * 256 + level, mask=inside, other=0.0)
        tl.store(result + place, value, mask=inside)

    return kernel
