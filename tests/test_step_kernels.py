"""The kernels of a captured step in Triton's interpreter; on a GPU in tests/test_gpu_steps.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mergestream.methods import fused_correction
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool import pixel_kernel

PROGRAMS = {
    "mix": "from kernel_checks import *\n[assert_the_mix_kernel_corrects_as_the_reference(*each) for each in MIXES]",
    "pixels": "from kernel_checks import *\n"
    "[assert_pixels_are_looked_up(*each) for each in ((1, 5, 3), (2, 64, 32), (3, 47, 45))]",
}


@pytest.mark.parametrize("kernel", PROGRAMS)
def test_the_kernels_do_what_the_torch_code_does(kernel: str) -> None:
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds only")
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAMS[kernel]], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_on_a_cpu_and_for_what_must_be_resized_there_is_no_kernel() -> None:
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    preprocessing = Preprocessing((8, 8))
    assert pixel_kernel.looked_up(images, preprocessing, torch.float32) is None
    assert not fused_correction.can_run(torch.zeros(4, 3))
