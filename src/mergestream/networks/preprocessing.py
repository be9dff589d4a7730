"""What a network expects of pixels: size, interpolation, mean and std, known per network or given."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from mergestream.runtime.errors import InputError, unknown_name

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """What a network expects of pixels: Resize((H,W)) without a crop, then mean and std per channel."""

    size: tuple[int, int]
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        size = self.size
        if not isinstance(size, tuple) or len(size) != 2 or not all(type(n) is int and 0 < n <= 4096 for n in size):
            raise InputError(f"size is (height, width) in whole pixels up to 4096, got {size!r}.")
        if self.interpolation not in [mode.value for mode in InterpolationMode]:
            raise unknown_name("interpolation", self.interpolation, [mode.value for mode in InterpolationMode])
        numbers = (*self.mean, *self.std)
        if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
            raise InputError(f"mean and std must be finite numbers, got {numbers}.")
        if not self.mean or len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise InputError(f"mean and std must be of one length and std above 0: {self.mean}, {self.std}.")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Preprocessing:
        height, width = value["size"]
        return cls((height, width), value["interpolation"], tuple(value["mean"]), tuple(value["std"]))

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 [B,c,h,w] of any size -> normalised fp32 [B,c,H,W]."""
        return self.normalised(resize(images, self.size, self.interpolation).to(torch.float32) / 255)

    def normalised(self, pixels: Tensor) -> Tensor:
        """[B,c,H,W] in 0 to 1 -> mean 0 and std 1 per channel, by the network's numbers."""
        mean, std = self.columns(pixels)
        return pixels.sub(mean).div_(std)

    def columns(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std as [c,1,1], of the type and on the device of the given tensor."""
        columns = _columns.__wrapped__ if torch.compiler.is_compiling() else _columns
        return columns(self.mean, self.std, like.device, like.dtype)


@lru_cache(maxsize=64)
def _columns(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Both as [c,1,1] on the device, sent there once: a copy in every step would keep a GPU waiting."""
    with torch.inference_mode(False):
        columns = (torch.tensor(values, dtype=dtype, device=device)[:, None, None] for values in (mean, std))
        return next(columns), next(columns)


def resize(images: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """[..., h, w] of any size -> [..., H, W], without a crop; images of that size stay as they are."""
    if tuple(images.shape[-2:]) == tuple(size):
        return images
    mode = InterpolationMode(interpolation)
    return transforms.resize(images, list(size), interpolation=mode, antialias=True)


def require_batch(images: Tensor, preprocessing: Preprocessing | None) -> None:
    """Refuse what is not a batch of images for this network, saying what it should be."""
    if not isinstance(images, Tensor):
        raise InputError(f"A batch is a torch.Tensor [B,c,H,W], got {type(images).__name__}: torch.from_numpy(…)?")
    if images.ndim != 4 or 0 in images.shape[1:]:
        raise InputError(f"A batch has the shape [B,c,H,W], got {tuple(images.shape)}; one image: images[None].")
    if len(images) == 0:
        raise InputError("The batch is empty; skip it, or wait for images.")
    channels = len(preprocessing.mean) if preprocessing else None
    if channels not in (None, images.shape[1]):
        raise InputError(
            f"The network takes {channels} channels, the batch has {images.shape[1]} (shape {tuple(images.shape)}, "
            f"expected [B,c,H,W]); grey to RGB: images.expand(-1, 3, -1, -1)."
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise InputError(f"A batch is uint8 pixels or preprocessed floats, got {images.dtype}.")
    if images.dtype == torch.uint8 and preprocessing is None:
        raise InputError(
            "This network's preprocessing is not known, so uint8 pixels cannot be prepared. "
            "Give preprocessing=mergestream.Preprocessing(size=…) to the pool, or pass preprocessed floats."
        )


def find_preprocessing(module: nn.Module, library: str, name: str) -> Preprocessing | None:
    """Known per network for timm, torchvision and Hugging Face; None where it is not, and pixels must come prepared."""
    if hasattr(module, "pretrained_cfg"):
        return _timm_preprocessing(module)
    if library == "transformers":
        return _transformers_preprocessing(module)
    if type(module).__module__.startswith("torchvision."):
        return _torchvision_preprocessing(module, name if library == "torchvision" else None)
    return None


def _timm_preprocessing(module: nn.Module) -> Preprocessing:
    from timm.data import resolve_model_data_config

    config = resolve_model_data_config(module)
    size = getattr(getattr(module, "patch_embed", None), "img_size", None) or config["input_size"][1:]
    channels = _input_channels(module, default=config["input_size"][0])
    mean, std = (tuple(config[key]) for key in ("mean", "std"))
    if channels != len(mean):
        mean, std = (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
    return Preprocessing((size[0], size[1]), config["interpolation"], mean, std)


def _input_channels(module: nn.Module, default: int) -> int:
    first = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    # Networks that fold space into depth start with a convolution of many channels.
    return first.in_channels if first is not None and first.in_channels <= 4 else default


def _torchvision_preprocessing(module: nn.Module, name: str | None) -> Preprocessing | None:
    """By name, that of its first published weights; of a bare module, only if all weights of its family agree."""
    from torchvision.models import WeightsEnum, get_model_weights

    if name is not None:
        presets = [next(iter(get_model_weights(name))).transforms()]
    else:
        family = vars(sys.modules[type(module).__module__]).values()
        enums: list[Any] = [e for e in family if isinstance(e, type) and issubclass(e, WeightsEnum)]
        presets = [weights.transforms() for enum in enums for weights in enum]
    found = {
        (int(getattr(module, "image_size", p.crop_size[0])), p.interpolation.value, tuple(p.mean), tuple(p.std))
        for p in presets
    }
    if len(found) != 1:
        return None
    size, mode, mean, std = found.pop()
    return Preprocessing((size, size), mode, mean, std)


def _transformers_preprocessing(module: nn.Module) -> Preprocessing | None:
    """The defaults of the image processor that Hugging Face pairs with this network, at the network's own size."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

    config: Any = module.config
    if type(config) not in IMAGE_PROCESSOR_MAPPING:
        return None
    known = IMAGE_PROCESSOR_MAPPING[type(config)]
    classes = known.values() if isinstance(known, dict) else known if isinstance(known, tuple) else (known,)
    processor = next(c for c in classes if c is not None)()
    plain = getattr(processor, "do_normalize", False) and not getattr(processor, "do_flip_channel_order", False)
    if not plain or not hasattr(processor, "size") or not hasattr(processor, "image_mean"):
        return None
    size = getattr(config, "image_size", None) or processor.size.get("height") or processor.size.get("shortest_edge")
    height, width = size if isinstance(size, list | tuple) else (size, size)
    mode = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")[int(processor.resample)]
    return Preprocessing((height, width), mode, tuple(processor.image_mean), tuple(processor.image_std))
