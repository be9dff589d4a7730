"""Transformer blocks on a GPU in half precision with fewer trips to memory: the same sums, rounded elsewhere.

A block of timm's vision transformers adds twice to its input: x + proj(attention(norm1(x))), then
x + fc2(gelu(fc1(norm2(x)))).
Here one kernel reads x and writes norm(x) and x + bias, and the product that follows is added onto the latter; GELU is
the product's own epilogue (its tanh form, whose distance from the exact one is below a half type's rounding of a sum).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from mergestream.pool.execution import replaced_forward

HALF = (torch.bfloat16, torch.float16)
ROWS, WARPS = 2, 2
FEW_TOKENS = 64


@contextmanager
def fused_blocks(networks: Sequence[nn.Module]) -> Iterator[None]:
    """Run transformer blocks that can be fused by `fused_forward`, inside the block."""
    blocks = [each for network in networks for each in network.modules() if can_be_fused(each)]
    last = [block for network in networks for block in last_block(network) if block in blocks]
    others = [each for each in blocks if each not in last]
    with replaced_forward(others, fused_forward), replaced_forward(last, fused_first_token):
        yield


def last_block(network: nn.Module) -> list[nn.Module]:
    """The last block of timm's plain network, if its first token alone is read and nobody listens in between."""
    if type(network) is not VisionTransformer or network.global_pool != "token" or getattr(network, "attn_pool", None):
        return []
    blocks, norm = network.get_submodule("blocks"), network.get_submodule("norm")
    *_, last = blocks.children()
    return [] if any(each._forward_hooks or each._forward_pre_hooks for each in (blocks, last, norm)) else [last]


def narrowed(network: nn.Module, form: torch.memory_format) -> nn.Module:
    """The network in bfloat16; on a CPU its last block computes only what its first token needs, where that is read."""
    network = network.bfloat16()
    network.register_forward_pre_hook(lambda _, given: (given[0].bfloat16().contiguous(memory_format=form),))
    for block in last_block(network):
        if type(block) is Block and is_plain(block) and not next(block.parameters()).is_cuda:
            block.forward = MethodType(first_token, block)  # type: ignore[method-assign]
    return network


def first_token(block: Block, x: Tensor) -> Tensor:
    """The first token [B,1,C] of the block's answer, by the block's own operations."""
    attention, (images, tokens, width) = block.attn, x.shape
    parts = functional.linear(block.norm1(x), attention.qkv.weight, attention.qkv.bias)
    query, key, value = parts.view(images, tokens, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = functional.scaled_dot_product_attention(query[:, :, :1], key, value)
    token = x[:, :1] + attention.proj(mixed.transpose(1, 2).reshape(images, 1, width))
    return token + block.mlp(block.norm2(token))


def can_be_fused(module: nn.Module) -> bool:
    """Whether the block is timm's plain one, in half precision on a GPU, and not being trained."""
    if type(module) is not Block or module.training or _kernels() is None:
        return False
    return is_plain(module) and all(parameter.is_cuda and parameter.dtype in HALF for parameter in module.parameters())


def is_plain(block: Block) -> bool:
    """Two norms, attention and a GELU network between two biased products; no scales, gates or norms inside."""
    attention, network = block.attn, block.mlp
    norms = (block.norm1, block.norm2)
    inside = [getattr(attention, name, None) for name in ("q_norm", "k_norm", "norm")]
    inside += [block.ls1, block.ls2, getattr(network, "norm", None)]
    return (
        type(attention) is Attention
        and type(network) is Mlp
        and all(isinstance(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None for norm in norms)
        and all(isinstance(part, nn.Identity) for part in inside)
        and type(network.act) is nn.GELU
        and getattr(attention, "gate", None) is None
        and attention.fused_attn
        and all(
            isinstance(each, nn.Linear) and each.bias is not None for each in (attention.proj, network.fc1, network.fc2)
        )
    )


def fused_forward(block: Block, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """The block's answer with fewer trips to memory."""
    if attn_mask is not None or is_causal:
        return Block.forward(block, x, attn_mask=attn_mask, is_causal=is_causal)  # type: ignore[no-any-return]
    residual, values = mixed_values(block, x)
    return transformed(block, residual.addmm_(values, block.attn.proj.weight.t())).view(x.shape)


def fused_first_token(block: Block, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """The first token [B,1,C] of the block's answer; what follows the attention is computed for no other."""
    if attn_mask is not None or is_causal:
        return Block.forward(block, x, attn_mask=attn_mask, is_causal=is_causal)  # type: ignore[no-any-return]
    residual, values = (each.view(x.shape)[:, 0] for each in mixed_values(block, x))
    return transformed(block, torch.addmm(residual, values, block.attn.proj.weight.t()))[:, None]


def mixed_values(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B·N,C] plus the bias of the attention's last product, and what that product reads."""
    normed, residual = norm_and_keep(x.reshape(-1, x.shape[-1]), block.norm1, block.attn.proj.bias)
    return residual, attended(block.attn, normed, x.shape[0])


def transformed(block: Block, tokens: Tensor) -> Tensor:
    """The second half of a block, of tokens [T,C]."""
    normed, residual = norm_and_keep(tokens, block.norm2, block.mlp.fc2.bias)
    hidden = torch._addmm_activation(block.mlp.fc1.bias, normed, block.mlp.fc1.weight.t(), use_gelu=True)
    return residual.addmm_(hidden, block.mlp.fc2.weight.t())


def attended(attention: Attention, tokens: Tensor, images: int) -> Tensor:
    """Every token's mixture of values [B·N,C], before the last product."""
    heads, width = attention.num_heads, attention.head_dim
    parts = functional.linear(tokens, attention.qkv.weight, attention.qkv.bias)
    query, key, value = parts.view(images, -1, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    # So few tokens that one program holds an image's head whole.
    if query.is_cuda and query.shape[2] <= FEW_TOKENS and width in (32, 64):
        return short_attention(parts, images, heads)
    mixed = functional.scaled_dot_product_attention(query, key, value)
    return mixed.transpose(1, 2).reshape(len(tokens), heads * width)


def norm_and_keep(tokens: Tensor, norm: nn.LayerNorm, bias: Tensor) -> tuple[Tensor, Tensor]:
    """norm(x) and x + bias, of tokens [T,C]."""
    if tokens.is_cuda:
        return norm_on_device(tokens.contiguous(), norm.weight, norm.bias, norm.eps, bias)
    normed = functional.layer_norm(tokens, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return normed, tokens + bias


def norm_on_device(x: Tensor, weight: Tensor, shift: Tensor, eps: float, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The layer norm of x [T,C], and x + bias: one reading of x, two writings, sums in fp32."""
    rows, width = x.shape
    normed, kept = torch.empty_like(x), torch.empty_like(x)
    block = 1 << (width - 1).bit_length()
    programs = (-(-rows // ROWS),)
    _kernels()[0][programs](
        x, weight, shift, bias, normed, kept, rows, width, eps, ROWS=ROWS, BLOCK=block, num_warps=WARPS
    )  # fmt: skip
    return normed, kept


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
    """The Triton kernels, compiled at their first use; None without Triton, which comes with torch's CUDA builds."""
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
