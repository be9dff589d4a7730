"""JPEG files decoded on a GPU, for those who ask: nvJPEG's pixels differ a little from the CPU's."""

import io
import logging
from collections.abc import Sequence
from functools import cache

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

logger = logging.getLogger(__name__)


@cache
def can_decode_on_gpu() -> bool:
    """Whether this torchvision, driver and GPU decode JPEG; found out by doing it, and told once if they do not."""
    if not torch.cuda.is_available():
        logger.warning("JPEG cannot be decoded on a GPU, for there is none: the CPU decodes instead.")
        return False
    probe = io.BytesIO()
    Image.new("RGB", (16, 16)).save(probe, "JPEG")
    try:
        _decoded([torch.frombuffer(bytearray(probe.getvalue()), dtype=torch.uint8)], torch.device("cuda"))
    except Exception as error:  # a build without nvJPEG, an old driver: each says it in its own way
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        logger.warning("JPEG cannot be decoded on this GPU (%s): the CPU decodes instead.", why)
        return False
    return True


def is_plain_jpeg(content: bytes) -> bool:
    """A JPEG that is grey or RGB. What has four channels is left to the CPU, where its colours are known."""
    if not content.startswith(b"\xff\xd8\xff"):
        return False
    try:
        with Image.open(io.BytesIO(content)) as image:  # reads the header only
            return image.format == "JPEG" and image.mode in ("L", "RGB")
    except (OSError, UnidentifiedImageError):
        return False  # the CPU's decoder says what is wrong with it


def decode_on_gpu(contents: Sequence[bytes], device: torch.device) -> list[Tensor | None]:
    """uint8 [3,h,w] of every JPEG, in the order of the calling thread's stream; None for one that the GPU refuses."""
    encoded = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    try:
        return list(_decoded(encoded, device))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # one of them, and nobody says which: neighbours must not change a picture's pixels
        return [_decoded_or_none(one, device) for one in encoded]


def _decoded_or_none(encoded: Tensor, device: torch.device) -> Tensor | None:
    try:
        return _decoded([encoded], device)[0]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None


def _decoded(encoded: list[Tensor], device: torch.device) -> list[Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg

    return decode_jpeg(encoded, mode=ImageReadMode.RGB, device=device) if encoded else []
