"""DomainBed's augmentation on a whole batch at once, on its device, every image with draws of its own.

RandomResizedCrop (70 to 100 % of the area), ColorJitter (0.3 for brightness, contrast, saturation and hue) and
RandomGrayscale (one in ten), scaled by a strength; flips are views and belong to the data set.
"""

import math

import torch
from torch import Tensor
from torchvision.transforms.v2.functional._color import _hsv_to_rgb, _rgb_to_hsv

from mergestream.preprocessing import Preprocessing
from mergestream.views import VIEWS

LUMA = (0.2989, 0.587, 0.114)  # of red, green and blue, as torchvision weighs them


def augmented(pixels: Tensor, strength: float) -> Tensor:
    """float [B,3,H,W] in 0 to 1 -> the same, cropped and recoloured; draws come from the device's generator."""
    if strength == 0:
        return pixels
    return _greyed(_jittered(_cropped(pixels, strength), strength), strength)


def flipped(images: Tensor, views: tuple[str, ...], preprocessing: Preprocessing) -> Tensor:
    """Each view on a random half of a prepared batch [B,c,H,W]."""
    for view in views:
        changed = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
        images = torch.where(changed, VIEWS[view](images, preprocessing), images)
    return images


def _cropped(pixels: Tensor, strength: float) -> Tensor:
    """A random part of every image, of 1 - 0.3·strength to 1 of its area and of sides 3:4 to 4:3, resized back."""
    area = 1 - 0.3 * strength * _uniform(pixels)
    shape = torch.exp(strength * math.log(4 / 3) * (2 * _uniform(pixels) - 1))
    height, width = ((area / shape).sqrt().clamp(max=1), (area * shape).sqrt().clamp(max=1))
    top, left = ((1 - side) * (2 * _uniform(pixels) - 1) for side in (height, width))
    zero = torch.zeros_like(top)
    rows = (torch.stack([width, zero, left], dim=-1), torch.stack([zero, height, top], dim=-1))
    grid = torch.nn.functional.affine_grid(torch.stack(rows, dim=1), list(pixels.shape), align_corners=False)
    return torch.nn.functional.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def _jittered(pixels: Tensor, strength: float) -> Tensor:
    """Brightness, contrast, saturation and hue, each by a random factor; always in this order."""
    brightness, contrast, saturation = (_factor(pixels, 0.3 * strength) for _ in range(3))
    pixels = (pixels * brightness).clamp(0, 1)
    middle = _grey(pixels).mean(dim=(1, 2, 3), keepdim=True)
    pixels = torch.lerp(middle.expand_as(pixels), pixels, contrast).clamp(0, 1)
    pixels = torch.lerp(_grey(pixels).expand_as(pixels), pixels, saturation).clamp(0, 1)
    hue, rest = _rgb_to_hsv(pixels).split((1, 2), dim=1)
    turn = 0.3 * strength * (2 * _uniform(pixels) - 1)
    return _hsv_to_rgb(torch.cat([(hue + turn[:, None, None, None]) % 1, rest], dim=1))


def _greyed(pixels: Tensor, strength: float) -> Tensor:
    chosen = _uniform(pixels)[:, None, None, None] < 0.1 * strength
    return torch.where(chosen, _grey(pixels).expand_as(pixels), pixels)


def _grey(pixels: Tensor) -> Tensor:
    weights = torch.tensor(LUMA, dtype=pixels.dtype, device=pixels.device)
    return torch.einsum("bchw,c->bhw", pixels, weights)[:, None]


def _factor(pixels: Tensor, spread: float) -> Tensor:
    return (1 + spread * (2 * _uniform(pixels) - 1))[:, None, None, None]


def _uniform(pixels: Tensor) -> Tensor:
    return torch.rand(len(pixels), device=pixels.device)
