"""Checks of a batch of images before a network sees it: its shape, its type, and floats that look like pixels."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mergestream.runtime.errors import InputError, MergestreamError

if TYPE_CHECKING:
    from mergestream.networks.preprocessing import Preprocessing

SMALLEST_SIDE = 16  # pixels: a shape [B,224,224,3] is then surely one with the channels last


def require_batch(images: object, channels: int | None) -> None:
    """Refuse what is no batch [B,c,H,W] of uint8 or floats, with the network's number of channels if it is known."""
    if not isinstance(images, Tensor):
        remedy = "torch.stack(images)" if isinstance(images, list | tuple) else "torch.from_numpy(images)"
        raise InputError(f"A batch is a torch.Tensor [B,c,H,W], got {type(images).__name__}: {remedy}?")
    if _has_channels_last(images.shape, channels):
        order = "permute(0, 3, 1, 2)" if images.ndim == 4 else "permute(2, 0, 1)[None]"
        raise InputError(f"The channels come last in {tuple(images.shape)}; a batch is [B,c,H,W]: images.{order}.")
    if images.ndim != 4 or 0 in images.shape[1:]:
        raise InputError(f"A batch has the shape [B,c,H,W], got {tuple(images.shape)}; one image: images[None].")
    if len(images) == 0:
        raise InputError("The batch is empty; skip it, or wait for images.")
    if channels not in (None, images.shape[1]):
        remedies = {1: "; grey to RGB: images.expand(-1, 3, -1, -1)", 4: "; without alpha: images[:, :3]"}
        raise InputError(
            f"The network takes {channels} channels, the batch has {images.shape[1]} (shape {tuple(images.shape)}, "
            f"expected [B,c,H,W]){remedies.get(images.shape[1], '') if channels == 3 else ''}."
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise InputError(f"A batch is uint8 pixels or preprocessed floats, got {images.dtype}: images.to(torch.uint8)?")


def _has_channels_last(shape: Sequence[int], channels: int | None) -> bool:
    if len(shape) not in (3, 4) or 0 in shape:
        return False
    first, height, last = shape[-3:]
    if channels is not None:
        return first != channels and last == channels
    return min(first, height) >= SMALLEST_SIDE and last in (1, 3, 4)


def require_preprocessed(images: Tensor, preprocessing: "Preprocessing | None") -> None:
    """Refuse floats that look like pixels in 0 to 1 or 0 to 255 where this network's input has other values.

    Preprocessed images have values below 0 wherever a pixel is darker than the mean. A constant batch is accepted.
    """
    if preprocessing is None or not images.is_floating_point():
        return
    low, high = (float(end) for end in torch.aminmax(images))
    largest = max((1 - mean) / std for mean, std in zip(preprocessing.mean, preprocessing.std, strict=True))
    starts_below = all(mean > 0 for mean in preprocessing.mean)
    if not 0 <= low < high:
        return
    if high <= 1 and starts_below:
        scale, pixels = "0 to 1", "(255 * images).round().to(torch.uint8)"
    elif largest < high <= 255:
        scale, pixels = "0 to 255", "images.to(torch.uint8)"
    else:
        return
    raise InputError(
        f"These floats look like pixels in {scale}, not like preprocessed images. Pass {pixels}, which are resized and "
        f"normalised here; or preprocessed=True if they are the network's input as they are."
    )


@contextmanager
def input_errors(batch: Tensor, preprocessing: "Preprocessing | None") -> Iterator[None]:
    """Report a network's failure on a batch as an error about the batch."""
    try:
        yield
    except (torch.OutOfMemoryError, MergestreamError):
        raise
    except (AssertionError, RuntimeError, ValueError) as error:
        own = f" (the pool's preprocessing is for {preprocessing.size})" if preprocessing else ""
        raise InputError(f"The network cannot take a batch of shape {tuple(batch.shape)}{own}: {error}") from error
