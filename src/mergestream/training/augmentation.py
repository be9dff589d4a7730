"""DomainBed's augmentation of a whole batch on its device, with separate draws for every image.

RandomResizedCrop (70 to 100 % of the area), ColorJitter (0.3 for brightness, contrast, saturation and hue) and
RandomGrayscale (one in ten), scaled by a strength; flips are views and belong to the data set.

Random numbers come in as `draws`, uniform in 0 to 1, so that a compiled pipeline draws the same as an eager one. The
conversions between RGB and hue are torchvision's, written without tables that it copies to the device on every call:
a captured step may not do that.
"""

import math

import torch
from torch import Tensor

from mergestream.networks.preprocessing import Preprocessing, views_for

LUMA = (0.2989, 0.587, 0.114)  # of red, green and blue, as torchvision weighs them
CROP_DRAWS, COLOUR_DRAWS, GREY_DRAWS = 4, 4, 1
AUGMENTATION_DRAWS = CROP_DRAWS + COLOUR_DRAWS + GREY_DRAWS


def draw(count: int, strength: float, views: tuple[str, ...], device: torch.device) -> Tensor:
    """Draw the numbers [D,B] that `prepare_batch` needs for `count` images."""
    return torch.rand((AUGMENTATION_DRAWS if strength else 0) + len(views), count, device=device)


def prepare_batch(
    strength: float, views: tuple[str, ...], preprocessing: Preprocessing, images: Tensor, draws: Tensor
) -> Tensor:
    """Augment uint8 images [B,3,H,W], normalise them, and apply each view to a random half."""
    pixels = images.to(torch.float32) / 255
    flips = draws[AUGMENTATION_DRAWS:] if strength else draws
    prepared, functions = preprocessing.normalised(augment(pixels, strength, draws)), views_for(preprocessing)
    for view, values in zip(views, flips, strict=True):
        prepared = torch.where(_per_image(values) < 0.5, functions[view](prepared), prepared)
    return prepared


def augment(pixels: Tensor, strength: float, draws: Tensor) -> Tensor:
    """Crop and recolour float images [B,3,H,W] in 0 to 1."""
    if strength == 0:
        return pixels
    crop, colour, grey = draws[:AUGMENTATION_DRAWS].split((CROP_DRAWS, COLOUR_DRAWS, GREY_DRAWS))
    pixels = _jitter_colour(_crop(pixels, strength, crop), strength, colour)
    return torch.where(_per_image(grey[0]) < 0.1 * strength, _grey(pixels).expand_as(pixels), pixels)


def _crop(pixels: Tensor, strength: float, draws: Tensor) -> Tensor:
    """Crop every image to 1 - 0.3·strength to 1 of its area, sides 3:4 to 4:3, and resize it back."""
    area = 1 - 0.3 * strength * draws[0]
    shape = torch.exp(strength * math.log(4 / 3) * _signed(draws[1]))
    height, width = ((area / shape).sqrt().clamp(max=1), (area * shape).sqrt().clamp(max=1))
    top, left = (1 - height) * _signed(draws[2]), (1 - width) * _signed(draws[3])
    zero = torch.zeros_like(top)
    rows = (torch.stack([width, zero, left], dim=-1), torch.stack([zero, height, top], dim=-1))
    grid = torch.nn.functional.affine_grid(torch.stack(rows, dim=1), list(pixels.shape), align_corners=False)
    return torch.nn.functional.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def _jitter_colour(pixels: Tensor, strength: float, draws: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue by random amounts, always in this order."""
    brightness, contrast, saturation = (_per_image(1 + 0.3 * strength * _signed(row)) for row in draws[:3])
    pixels = (pixels * brightness).clamp(0, 1)
    middle = _grey(pixels).mean(dim=(1, 2, 3), keepdim=True)
    pixels = torch.lerp(middle.expand_as(pixels), pixels, contrast).clamp(0, 1)
    pixels = torch.lerp(_grey(pixels).expand_as(pixels), pixels, saturation).clamp(0, 1)
    hue, saturations, values = _rgb_to_hsv(pixels).split(1, dim=1)
    turn = _per_image(0.3 * strength * _signed(draws[3]))
    return _hsv_to_rgb(hue + turn, saturations, values)


def _rgb_to_hsv(pixels: Tensor) -> Tensor:
    """Convert [B,3,H,W] to hue, saturation and value."""
    red, green, _ = pixels.unbind(dim=1)
    low, high = torch.aminmax(pixels, dim=1)
    spread, one = high - low, torch.ones_like(high)
    grey = high == low
    from_red, from_green, from_blue = ((high[:, None] - pixels) / torch.where(grey, one, spread)[:, None]).unbind(dim=1)
    other = torch.where(high == green, from_red + 2 - from_blue, from_green + 4 - from_red)
    hue = torch.where(high == red, from_blue - from_green, other)
    return torch.stack([(hue * (1 / 6) + 1).fmod(1), spread / torch.where(grey, one, high), high], dim=1)


def _hsv_to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Convert [B,1,H,W] each to [B,3,H,W]."""
    offsets = torch.cat([torch.full_like(hue, shift) for shift in (5.0, 3.0, 1.0)], dim=1)
    turned = (offsets + 6 * hue) % 6
    return value - value * saturation * torch.minimum(turned, 4 - turned).clamp(0, 1)


def _grey(pixels: Tensor) -> Tensor:
    red, green, blue = pixels.unbind(dim=1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue)[:, None]


def _signed(draws: Tensor) -> Tensor:
    """Stretch 0 to 1 to -1 to 1."""
    return 2 * draws - 1


def _per_image(values: Tensor) -> Tensor:
    """Reshape [B] to [B,1,1,1]."""
    return values[:, None, None, None]
