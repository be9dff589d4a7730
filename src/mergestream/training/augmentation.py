"""DomainBed's augmentation on a whole batch at once, on its device, every image with draws of its own.

RandomResizedCrop (70 to 100 % of the area), ColorJitter (0.3 for brightness, contrast, saturation and hue) and
RandomGrayscale (one in ten), scaled by a strength; flips are views and belong to the data set.

What is random comes in as `draws`, uniform in 0 to 1, so that a compiled pipeline draws what an eager one draws.
"""

import math

import torch
from torch import Tensor
from torchvision.transforms.v2.functional._color import _rgb_to_hsv

from mergestream.networks.preprocessing import Preprocessing
from mergestream.networks.views import VIEWS

LUMA = (0.2989, 0.587, 0.114)  # of red, green and blue, as torchvision weighs them
CROP_DRAWS, COLOUR_DRAWS, GREY_DRAWS = 4, 4, 1
AUGMENTATION_DRAWS = CROP_DRAWS + COLOUR_DRAWS + GREY_DRAWS


def draw(count: int, strength: float, views: tuple[str, ...], device: torch.device) -> Tensor:
    """The draws [D,B] that `changed` wants for `count` images."""
    return torch.rand((AUGMENTATION_DRAWS if strength else 0) + len(views), count, device=device)


def changed(
    images: Tensor, draws: Tensor, strength: float, views: tuple[str, ...], preprocessing: Preprocessing
) -> Tensor:
    """uint8 [B,3,H,W] -> what the network is trained on: augmented, normalised, each view on a random half."""
    pixels = images.to(torch.float32) / 255
    flips = draws[AUGMENTATION_DRAWS:] if strength else draws
    return flipped(preprocessing.normalised(augmented(pixels, strength, draws)), flips, views, preprocessing)


def augmented(pixels: Tensor, strength: float, draws: Tensor) -> Tensor:
    """float [B,3,H,W] in 0 to 1 -> the same, cropped and recoloured."""
    if strength == 0:
        return pixels
    crop, colour, grey = draws[:AUGMENTATION_DRAWS].split((CROP_DRAWS, COLOUR_DRAWS, GREY_DRAWS))
    return _greyed(_jittered(_cropped(pixels, strength, crop), strength, colour), strength, grey)


def flipped(images: Tensor, draws: Tensor, views: tuple[str, ...], preprocessing: Preprocessing) -> Tensor:
    """Each view on a random half of a prepared batch [B,c,H,W]."""
    for view, drawn in zip(views, draws, strict=True):
        images = torch.where(_each(drawn) < 0.5, VIEWS[view](images, preprocessing), images)
    return images


def _cropped(pixels: Tensor, strength: float, draws: Tensor) -> Tensor:
    """A random part of every image, of 1 - 0.3·strength to 1 of its area and of sides 3:4 to 4:3, resized back."""
    area = 1 - 0.3 * strength * draws[0]
    shape = torch.exp(strength * math.log(4 / 3) * _signed(draws[1]))
    height, width = ((area / shape).sqrt().clamp(max=1), (area * shape).sqrt().clamp(max=1))
    top, left = (1 - height) * _signed(draws[2]), (1 - width) * _signed(draws[3])
    zero = torch.zeros_like(top)
    rows = (torch.stack([width, zero, left], dim=-1), torch.stack([zero, height, top], dim=-1))
    grid = torch.nn.functional.affine_grid(torch.stack(rows, dim=1), list(pixels.shape), align_corners=False)
    return torch.nn.functional.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def _jittered(pixels: Tensor, strength: float, draws: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue, each by a random factor; always in this order."""
    brightness, contrast, saturation = (_each(1 + 0.3 * strength * _signed(drawn)) for drawn in draws[:3])
    pixels = (pixels * brightness).clamp(0, 1)
    middle = _grey(pixels).mean(dim=(1, 2, 3), keepdim=True)
    pixels = torch.lerp(middle.expand_as(pixels), pixels, contrast).clamp(0, 1)
    pixels = torch.lerp(_grey(pixels).expand_as(pixels), pixels, saturation).clamp(0, 1)
    hue, rest = _rgb_to_hsv(pixels).split((1, 2), dim=1)
    turn = _each(0.3 * strength * _signed(draws[3]))
    return _rgb(hue + turn, *rest.split(1, dim=1))


def _rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """[B,1,H,W] each -> [B,3,H,W]; torchvision's own sends a table to the device in every call, which a captured step
    may not do.
    """
    offsets = torch.cat([torch.full_like(hue, shift) for shift in (5.0, 3.0, 1.0)], dim=1)
    turned = (offsets + 6 * hue) % 6
    return value - value * saturation * torch.minimum(turned, 4 - turned).clamp(0, 1)


def _greyed(pixels: Tensor, strength: float, draws: Tensor) -> Tensor:
    chosen = _each(draws[0]) < 0.1 * strength
    return torch.where(chosen, _grey(pixels).expand_as(pixels), pixels)


def _grey(pixels: Tensor) -> Tensor:
    red, green, blue = pixels.unbind(dim=1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue)[:, None]


def _signed(draws: Tensor) -> Tensor:
    """0 to 1 -> -1 to 1."""
    return 2 * draws - 1


def _each(values: Tensor) -> Tensor:
    """[B] -> [B,1,1,1]: one value an image."""
    return values[:, None, None, None]
