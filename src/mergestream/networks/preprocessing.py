"""Preprocessing of pixels for a network, as its library recorded it, and views of preprocessed batches."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.networks.batch_checks import require_batch
from mergestream.runtime.errors import InputError, require_known
from mergestream.runtime.option_checks import names

INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")  # torchvision's
# The names of Pillow's resampling filters, by number.
PILLOW_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
LARGEST = 1e6  # of a mean or std, so that no pixel becomes infinite
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """Resize to (H, W) without a crop, then normalise by mean and std per channel."""

    size: tuple[int, int]
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        size = self.size
        if not isinstance(size, tuple) or len(size) != 2 or not all(type(n) is int and 0 < n <= 4096 for n in size):
            raise InputError(f"size is (height, width) in whole pixels up to 4096, got {size!r:.200}.")
        require_known("interpolation", self.interpolation, INTERPOLATIONS)
        for values in (self.mean, self.std):
            plain = isinstance(values, list | tuple) and 0 < len(values) <= 64
            if not plain or not all(isinstance(n, int | float) and abs(n) <= LARGEST for n in values):
                raise InputError(f"mean and std must be finite numbers up to {LARGEST:g}, got {values!r:.200}.")
        if len(self.mean) != len(self.std) or not all(value >= 1 / LARGEST for value in self.std):
            raise InputError(f"mean and std must be of one length and std above 0: {self.mean}, {self.std}.")

    def __call__(self, images: Tensor) -> Tensor:
        """Convert uint8 [B,c,h,w] of any size to normalised fp32 [B,c,H,W]."""
        return network_input(images, self, images.device)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Normalise pixels [B,c,H,W] in 0 to 1 by mean and std per channel."""
        mean, std = self.columns(pixels)
        return pixels.sub(mean).div_(std)

    def columns(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std as [c,1,1], with the type and device of a tensor."""
        columns = _columns.__wrapped__ if torch.compiler.is_compiling() else _columns
        return columns(self.mean, self.std, like.device, like.dtype)


@lru_cache(maxsize=64)
def _columns(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cached on the device: a copy in every step would stall a GPU."""
    with torch.inference_mode(False):
        columns = (torch.tensor(values, dtype=dtype, device=device)[:, None, None] for values in (mean, std))
        return next(columns), next(columns)


def network_input(images: Tensor, preprocessing: Preprocessing | None, device: torch.device) -> Tensor:
    """Check a batch, then resize and normalise uint8 [B,c,h,w] of any size; preprocessed floats are unchanged."""
    channels = len(preprocessing.mean) if preprocessing else None
    is_usual = isinstance(images, Tensor) and images.ndim == 4 and images.dtype == torch.uint8
    if not is_usual or 0 in images.shape or images.shape[1] != channels:  # a step is few functions
        require_batch(images, channels)
    if images.dtype != torch.uint8:
        return images
    if preprocessing is None:
        raise InputError(
            "This network's preprocessing is unknown, so uint8 pixels cannot be prepared. "
            "Give preprocessing=mergestream.Preprocessing(size=…) to the pool, or pass preprocessed floats."
        )
    pixels = resizer(preprocessing.size, preprocessing.interpolation)(images.to(device)).to(torch.float32) / 255
    mean, std = _columns(preprocessing.mean, preprocessing.std, pixels.device, pixels.dtype)  # a step is few functions
    return pixels.sub(mean).div_(std)


@lru_cache(maxsize=64)
def resizer(size: tuple[int, int], interpolation: str) -> Callable[[Tensor], Tensor]:
    """A function that resizes [..., c, h, w] to [..., c, H, W] without a crop; images of that size are unchanged."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2.functional import resize

    return partial(resize, size=list(size), interpolation=InterpolationMode(interpolation), antialias=True)


def find_preprocessing(module: nn.Module, library: str, name: str) -> Preprocessing | None:
    """The preprocessing recorded by timm, torchvision or Hugging Face; None if there is none."""
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
    # Networks that fold space into depth start with a convolution over many channels.
    return first.in_channels if first is not None and first.in_channels <= 4 else default


def _torchvision_preprocessing(module: nn.Module, name: str | None) -> Preprocessing | None:
    """That of the first published weights of a name; for a bare module, only if all weights of its family agree."""
    from torchvision.models import WeightsEnum, get_model_weights

    if name is not None:
        presets = [next(iter(get_model_weights(name))).transforms()]
    else:
        family = vars(sys.modules[type(module).__module__]).values()
        enums: list[Any] = [e for e in family if isinstance(e, type) and issubclass(e, WeightsEnum)]
        presets = [weights.transforms() for enum in enums for weights in enum]
    settings = {
        (int(getattr(module, "image_size", p.crop_size[0])), p.interpolation.value, tuple(p.mean), tuple(p.std))
        for p in presets
    }
    if len(settings) != 1:
        return None
    size, mode, mean, std = settings.pop()
    return Preprocessing((size, size), mode, mean, std)


def _transformers_preprocessing(module: nn.Module) -> Preprocessing | None:
    """The defaults of the image processor that Hugging Face pairs with this network, at the network's own size."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

    config: Any = module.config
    if type(config) not in IMAGE_PROCESSOR_MAPPING:
        return None
    entry = IMAGE_PROCESSOR_MAPPING[type(config)]
    classes = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, tuple) else (entry,)
    processor = next(c for c in classes if c is not None)()
    plain = getattr(processor, "do_normalize", False) and not getattr(processor, "do_flip_channel_order", False)
    if not plain or not hasattr(processor, "size") or not hasattr(processor, "image_mean"):
        return None
    size = getattr(config, "image_size", None) or processor.size.get("height") or processor.size.get("shortest_edge")
    height, width = size if isinstance(size, list | tuple) else (size, size)
    mode = PILLOW_FILTERS[int(processor.resample)]
    return Preprocessing((height, width), mode, tuple(processor.image_mean), tuple(processor.image_std))


BRIGHTNESS = 1.15
# Name of the unaltered batch, where logits are stored by view.
ORIGINAL = "original"


def transpose(images: Tensor) -> Tensor:
    if images.shape[-1] != images.shape[-2]:
        raise InputError(f"The view 'transpose' needs square images, got {tuple(images.shape[-2:])}.")
    return images.transpose(-1, -2).contiguous()


def brightness(images: Tensor, preprocessing: Preprocessing | None) -> Tensor:
    """Every pixel 15 % brighter, clipped at white: for data in which a flip may change the class."""
    if preprocessing is None:
        raise InputError("The view 'brightness' needs the pool's preprocessing (mean, std); give preprocessing=.")
    mean, std = preprocessing.columns(images)
    return (((images * std + mean) * BRIGHTNESS).clamp(0, 1) - mean) / std


VIEWS = ("hflip", "vflip", "rot180", "transpose", "brightness")


def views_for(preprocessing: Preprocessing | None) -> dict[str, Callable[[Tensor], Tensor]]:
    """Deterministic, label-preserving views of a preprocessed batch [B,c,H,W], by name."""
    return {
        "hflip": partial(torch.flip, dims=(-1,)),
        "vflip": partial(torch.flip, dims=(-2,)),
        "rot180": partial(torch.flip, dims=(-2, -1)),
        "transpose": transpose,
        "brightness": partial(brightness, preprocessing=preprocessing),
    }


def view_names(option: str, value: Sequence[str]) -> tuple[str, ...]:
    """Check an option that names views."""
    listed = names(option, value)
    for name in listed:
        require_known("view", name, VIEWS)
    return listed
