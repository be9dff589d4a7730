"""The fused merge, run by Triton's interpreter on the CPU: what a GPU would compute, one program after the other."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds only")
PROGRAM = """
import torch
from hypothesis import given, settings, strategies as st
from mergestream.functional.merging import weighted_sums
from mergestream.functional.merging.weighted_sums import weighted_sum

weighted_sums.BLOCK = 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(DTYPES)), st.integers(1, 5), st.integers(1, 400), st.integers(0, 2**16))
def sums(name, count, size, seed):
    generator = torch.Generator().manual_seed(seed)
    bank = torch.randn(count, size + 7, generator=generator).to(DTYPES[name])
    rows, shares = bank[:, 3 : size + 3], torch.softmax(torch.randn(count, generator=generator), dim=0)
    shares = torch.where(torch.rand(count, generator=generator) < 0.3, 0.0, shares)
    out = torch.full((size,), torch.nan, dtype=rows.dtype)
    assert weighted_sums.kernel_can_run(rows, out)
    weighted_sums.kernel_sum(rows, shares, out)
    expected = weighted_sum(rows, shares, torch.empty_like(out))
    # One rounding of the total apart, where products and sums are fused.
    torch.testing.assert_close(out, expected)

def one_row_bit_for_bit():
    for dtype in DTYPES.values():
        bank = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
        bank[1, :4] = torch.tensor([-0.0, 0.0, 1e-7, -1e-7])
        bank[0, 2], bank[2, 3] = torch.inf, torch.nan
        out = weighted_sums.kernel_sum(bank, torch.tensor([0.0, 1.0, 0.0]), torch.empty(200, dtype=dtype))
        assert torch.equal(out.view(torch.uint8), bank[1].view(torch.uint8))

sums()
one_row_bit_for_bit()
"""


@pytest.mark.slow
def test_the_fused_merge_is_the_host_s() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
