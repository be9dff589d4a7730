"""Transformer blocks on a GPU in half precision with fewer trips to memory: the same sums, rounded elsewhere.

A block of timm's vision transformers adds twice to its input: x + proj(attention(norm1(x))), then
x + fc2(gelu(fc1(norm2(x)))).
Here one kernel reads x and writes norm(x) and x + bias, and the product that follows is added onto the latter; GELU is
the product's own epilogue (its tanh form, whose distance from the exact one is below a half type's rounding of a sum).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional

from mergestream.pool import fused_kernels
from mergestream.pool.execution import replaced_forward

HALF = (torch.bfloat16, torch.float16)


def fused_blocks(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Run transformer blocks that can be fused by `fused_forward`, inside the block."""
    blocks = [each for module in modules for each in module.modules() if can_be_fused(each)]
    return replaced_forward(blocks, fused_forward)


def can_be_fused(module: nn.Module) -> bool:
    """Whether the block is timm's plain one, in half precision on a GPU, and not being trained."""
    if type(module) is not Block or module.training or not fused_kernels.available():
        return False
    return is_plain(module) and all(parameter.is_cuda and parameter.dtype in HALF for parameter in module.parameters())


def is_plain(block: Block) -> bool:
    """Two norms, attention and a GELU network between two biased products; no scales, gates or norms inside."""
    attention, network = block.attn, block.mlp
    norms = (block.norm1, block.norm2)
    inside = (block.ls1, block.ls2, getattr(network, "norm", None), *_inside(attention))
    return (
        type(attention) is Attention
        and type(network) is Mlp
        and all(isinstance(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None for norm in norms)
        and all(isinstance(part, nn.Identity) for part in inside)
        and type(network.act) is nn.GELU
        and getattr(attention, "gate", None) is None
        and attention.fused_attn
        and all(isinstance(product, nn.Linear) and product.bias is not None for product in _products(block))
    )


def _inside(attention: nn.Module) -> tuple[Any, ...]:
    return tuple(getattr(attention, name, None) for name in ("q_norm", "k_norm", "norm"))


def _products(block: Block) -> tuple[Any, ...]:
    return (block.attn.proj, block.mlp.fc1, block.mlp.fc2)


def fused_forward(block: Block, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """The block's answer with fewer trips to memory."""
    if attn_mask is not None or is_causal:
        return Block.forward(block, x, attn_mask=attn_mask, is_causal=is_causal)  # type: ignore[no-any-return]
    tokens = x.reshape(-1, x.shape[-1])
    normed, residual = norm_and_keep(tokens, block.norm1, block.attn.proj.bias)
    values = attended(block.attn, normed, x.shape[0])
    tokens = residual.addmm_(values, block.attn.proj.weight.t())
    normed, residual = norm_and_keep(tokens, block.norm2, block.mlp.fc2.bias)
    hidden = torch._addmm_activation(block.mlp.fc1.bias, normed, block.mlp.fc1.weight.t(), use_gelu=True)
    return residual.addmm_(hidden, block.mlp.fc2.weight.t()).view(x.shape)


def attended(attention: Attention, tokens: Tensor, images: int) -> Tensor:
    """Every token's mixture of values [B·N,C], before the last product."""
    heads, width = attention.num_heads, attention.head_dim
    parts = functional.linear(tokens, attention.qkv.weight, attention.qkv.bias)
    query, key, value = parts.view(images, -1, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    if fused_kernels.short(query):
        return fused_kernels.short_attention(parts, images, heads)
    mixed = functional.scaled_dot_product_attention(query, key, value)
    return mixed.transpose(1, 2).reshape(len(tokens), heads * width)


def norm_and_keep(tokens: Tensor, norm: nn.LayerNorm, bias: Tensor) -> tuple[Tensor, Tensor]:
    """norm(x) and x + bias, of tokens [T,C]."""
    if tokens.is_cuda:
        return fused_kernels.norm_and_keep(tokens.contiguous(), norm.weight, norm.bias, norm.eps, bias)
    normed = functional.layer_norm(tokens, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return normed, tokens + bias
