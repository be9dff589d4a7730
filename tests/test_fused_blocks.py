"""Transformer blocks with fused kernels: the same answers as timm's, on the CPU and in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import timm
import torch
from timm.models.vision_transformer import Block
from torch import nn

from mergestream.pool import fused_blocks

SMALL = {"embed_dim": 64, "num_heads": 2, "depth": 2, "img_size": 32, "patch_size": 8, "num_classes": 3}
PROGRAM = """
import torch
from hypothesis import given, settings, strategies as st
from mergestream.pool import fused_blocks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The interpreter multiplies bfloat16 as the integers that hold its bits.
exact = st.sampled_from(("float32", "float16"))
dtypes, seeds = st.sampled_from(sorted(DTYPES)), st.integers(0, 2**16)

@settings(max_examples=15, deadline=None, derandomize=True)
@given(dtypes, st.integers(1, 9), st.integers(1, 70), seeds)
def norms(name, rows, width, seed):
    torch.manual_seed(seed)
    x, weight, shift, bias = (torch.randn(*shape).to(DTYPES[name]) for shape in ((rows, width), *[(width,)] * 3))
    normed, kept = fused_blocks.norm_on_device(x, weight, shift, 1e-6, bias)
    expected = torch.nn.functional.layer_norm(x.float(), (width,), weight.float(), shift.float(), 1e-6)
    if width > 1:  # one number alone is its own mean: what is left is rounding
        close = 2e-2 if x.dtype != torch.float32 else 1e-4
        torch.testing.assert_close(normed, expected.to(x.dtype), rtol=2e-2, atol=close)
    torch.testing.assert_close(kept, x + bias)

@settings(max_examples=15, deadline=None, derandomize=True)
@given(exact, st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.sampled_from((32, 64)), seeds)
def attention(name, images, heads, tokens, width, seed):
    torch.manual_seed(seed)
    parts = torch.randn(images * tokens, 3 * heads * width).to(DTYPES[name])
    found = fused_blocks.short_attention(parts, images, heads)
    query, key, value = parts.float().view(images, tokens, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    shares = torch.softmax(query @ key.transpose(-1, -2) / width**0.5, dim=-1)
    expected = (shares @ value).transpose(1, 2).reshape(len(parts), heads * width)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2 if name != "float32" else 1e-4)

norms()
attention()
"""


@pytest.mark.slow
def test_the_kernels_are_what_they_say() -> None:
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds only")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def network(**changes: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{**SMALL, **changes}).eval()  # type: ignore[no-any-return]


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks on the CPU are taken for blocks on a GPU; kernels fall back to PyTorch's own operations."""
    monkeypatch.setattr(fused_blocks, "can_be_fused", lambda each: type(each) is Block and fused_blocks.is_plain(each))


@pytest.mark.usefixtures("on_any_device")
@torch.inference_mode()
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_fused_blocks_answer_as_the_blocks_do(pool: str) -> None:
    module, images = network(global_pool=pool), torch.randn(3, 3, 32, 32)
    for parameter in module.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))  # biases are zero at first
    expected = module(images)
    with fused_blocks.fused_blocks([module]):
        first, last = (block.forward.__func__ for block in module.blocks)
        assert first is fused_blocks.fused_forward
        assert last is (fused_blocks.fused_first_token if pool == "token" else fused_blocks.fused_forward)
        result = module(images)
    assert all(block.forward.__func__ is Block.forward for block in module.blocks)
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=2e-3)  # GELU in its tanh form
    torch.testing.assert_close(module(images), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("on_any_device")
@torch.inference_mode()
def test_a_last_block_that_somebody_listens_to_is_computed_whole() -> None:
    module, heard = network(), []
    module.blocks[-1].register_forward_hook(lambda _, __, answer: heard.append(answer.shape))
    with fused_blocks.fused_blocks([module]):
        module(torch.randn(3, 3, 32, 32))
    assert heard == [(3, 17, 64)]


@pytest.mark.usefixtures("on_any_device")
def test_an_error_inside_gives_the_blocks_back() -> None:
    module = network()
    with pytest.raises(RuntimeError, match="inside"), fused_blocks.fused_blocks([module]):
        raise RuntimeError("inside")
    assert all(block.forward.__func__ is Block.forward for block in module.blocks)


@pytest.mark.parametrize(
    "changes", [{"init_values": 1e-5}, {"qk_norm": True}, {"proj_bias": False}, {"act_layer": nn.ReLU}], ids=str
)
def test_a_block_that_is_another_one_is_left_alone(changes: dict[str, object]) -> None:
    assert all(fused_blocks.is_plain(block) for block in network().blocks)
    assert not any(fused_blocks.is_plain(block) for block in network(**changes).blocks)


def test_blocks_in_float32_or_on_a_cpu_are_left_alone() -> None:
    assert not any(fused_blocks.can_be_fused(block) for block in network().blocks)
    assert not any(fused_blocks.can_be_fused(block) for block in network().bfloat16().blocks)


@torch.inference_mode()
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_a_narrowed_network_answers_as_in_bfloat16(pool: str) -> None:
    images = torch.randn(3, 3, 32, 32)
    expected = network(global_pool=pool).bfloat16()(images.bfloat16())
    narrow = fused_blocks.narrowed(network(global_pool=pool), torch.contiguous_format)
    assert ("forward" in vars(narrow.blocks[-1])) == (pool == "token")
    torch.testing.assert_close(narrow(images), expected, rtol=2e-2, atol=2e-2)
