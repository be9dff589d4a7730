"""Deterministic, label-preserving views of a preprocessed batch [B,c,H,W]."""

from collections.abc import Callable

from torch import Tensor

from mergestream.networks.preprocessing import Preprocessing
from mergestream.runtime.errors import InputError, unknown_name

BRIGHTNESS = 1.15
# Name of the unaltered batch, where logits are stored by view.
ORIGINAL = "original"


def hflip(images: Tensor, preprocessing: Preprocessing | None) -> Tensor:
    return images.flip(-1)


def vflip(images: Tensor, preprocessing: Preprocessing | None) -> Tensor:
    return images.flip(-2)


def rot180(images: Tensor, preprocessing: Preprocessing | None) -> Tensor:
    return images.flip(-2, -1)


def transpose(images: Tensor, preprocessing: Preprocessing | None) -> Tensor:
    if images.shape[-1] != images.shape[-2]:
        raise InputError(f"The view 'transpose' needs square images, got {tuple(images.shape[-2:])}.")
    return images.transpose(-1, -2).contiguous()


def brightness(images: Tensor, preprocessing: Preprocessing | None) -> Tensor:
    """Every pixel 15 % brighter, clipped at white: for data in which a flip may change the class."""
    if preprocessing is None:
        raise InputError("The view 'brightness' needs the pool's preprocessing (mean, std); give preprocessing=.")
    mean, std = preprocessing.columns(images)
    return (((images * std + mean) * BRIGHTNESS).clamp(0, 1) - mean) / std


VIEWS: dict[str, Callable[[Tensor, Preprocessing | None], Tensor]] = {
    "hflip": hflip,
    "vflip": vflip,
    "rot180": rot180,
    "transpose": transpose,
    "brightness": brightness,
}


def require_views(names: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse unknown names of views."""
    for name in names:
        if name not in VIEWS:
            raise unknown_name("view", name, VIEWS)
    return names
