"""The kernels of a captured step against the torch code: on a GPU, or in Triton's interpreter."""

from unittest import mock

import torch

from mergestream.methods import fused_correction
from mergestream.methods.correction import Correction, LongRun
from mergestream.methods.fading_window import FadingWindow
from mergestream.methods.state import tensors
from mergestream.networks.preprocessing import Preprocessing, network_input
from mergestream.pool import pixel_kernel
from mergestream.pool.runner import Batch

# Images, of which so many are padding, classes, sets of answers, and the bias that a batch may have.
MIXES = [(1, 0, 2, 1, 0.3), (2, 1, 2, 2, 0.3), (5, 2, 3, 2, 0.0), (8, 0, 7, 1, 0.3), (7, 3, 4, 2, 1.0)]


def assert_the_mix_kernel_corrects_as_the_reference(
    images: int, padding: int, classes: int, sets: int, bias: float, device: str = "cpu", steps: int = 5
) -> None:
    torch.manual_seed(images)
    home = torch.softmax(torch.randn(classes), dim=0).to(device)
    unit = Correction(LongRun(home, torch.ones_like(home), 0.0), bias)
    shares = torch.tensor([1 / (images - padding)] * (images - padding) + [0.0] * padding, device=device)
    plain = fused = unit.start(3)
    own = other = plain.long_run
    for number in range(steps):
        clump = torch.eye(classes)[number % classes] * 3.0 * (number % 2)  # every other batch has one class
        x, y = (torch.softmax(torch.randn(images, classes) * 2 + clump, dim=-1).to(device) for _ in range(2))
        window = FadingWindow.of(Batch(x, shares=shares), 64)
        one, own, plain = unit.correct_all(plain, x, None, (own, y) if sets == 2 else None, window)
        with mock.patch.object(fused_correction, "can_run", return_value=True):
            two, other, fused = unit.correct_all(fused, x, None, (other, y) if sets == 2 else None, window, fused=True)
        real = images - padding
        torch.testing.assert_close(two[:, :real], one[:, :real], rtol=1e-4, atol=1e-5)
        for expected, state in ((plain, fused), (own, other)):
            for name, value in tensors(expected).items():
                torch.testing.assert_close(
                    tensors(state)[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
                )


def assert_pixels_are_looked_up(images: int, height: int, width: int, device: str = "cpu") -> None:
    preprocessing = Preprocessing((height, width), mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
    generator = torch.Generator().manual_seed(height)
    pixels = torch.randint(0, 256, (images, 3, height, width), dtype=torch.uint8, generator=generator).to(device)
    for dtype, close in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        table = pixel_kernel._table(preprocessing, pixels.device, dtype)
        expected = network_input(pixels, preprocessing, pixels.device).to(dtype)
        rows = pixels.transpose(2, 3).contiguous().transpose(2, 3)  # not as the kernel reads them
        for each in (pixels, rows):
            torch.testing.assert_close(pixel_kernel.by_table(each, table), expected, rtol=close, atol=close)
