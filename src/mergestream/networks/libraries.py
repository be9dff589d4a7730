"""Networks of timm, torchvision, Hugging Face and MONAI: built by name, and the preprocessing recorded for them."""

import inspect
import re
import reprlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from mergestream.networks.allow_list import MONAI, TRANSFORMERS, construct
from mergestream.networks.preprocessing import Preprocessing
from mergestream.runtime.errors import MergestreamError, NetworkError, unknown_name

Build = Callable[[], nn.Module]


def build_network(library: str, name: str, arguments: dict[str, Any], most: int | None = None) -> nn.Module:
    """Build a network of a library with random weights; see `allow_list` for what a card may ask for."""
    title = f"{library}:{name}"
    try:
        return construct(LIBRARIES[library](name, arguments), title, most)
    except MergestreamError:
        raise
    except Exception as error:  # a library can fail in any way on arguments from elsewhere
        message, given = str(error).split("\n")[0][:300], reprlib.repr(arguments)
        hint = " Give its arguments with --arg, except the number of classes." if library == "monai" else ""
        raise NetworkError(f"Cannot build {title} with {given}: {message!r} (in {library}).{hint}") from error


def _timm(name: str, arguments: dict[str, Any]) -> Build:
    import timm

    # A name and at most a tag: prefixes such as 'hf-hub:' and 'local-dir:' would make timm read elsewhere.
    if not re.fullmatch(r"\w+(\.\w+)?", name, re.ASCII) or not timm.is_model(name):
        raise unknown_name("timm network", name, timm.list_models())
    return partial(timm.create_model, name, **{**arguments, "pretrained": False})


def _torchvision(name: str, arguments: dict[str, Any]) -> Build:
    from torchvision import models

    classifiers = models.list_models(module=models)
    if name not in classifiers:
        raise unknown_name("torchvision network", name, classifiers)
    return partial(models.get_model, name, **{**arguments, "weights": None})


def _transformers(name: str, arguments: dict[str, Any]) -> Build:
    if name not in TRANSFORMERS:
        raise unknown_name("transformers network", name, TRANSFORMERS)
    import transformers

    network = getattr(transformers, name)
    return lambda: network(network.config_class(**arguments))


def _monai(name: str, arguments: dict[str, Any]) -> Build:
    try:
        from monai.networks import nets
    except ImportError:
        raise NetworkError("MONAI is not installed: pip install 'mergestream[monai]'.") from None
    classifiers = {n: v for n, v in vars(nets).items() if MONAI.fullmatch(n) and not inspect.ismodule(v)}
    if name not in classifiers:
        raise unknown_name("MONAI classifier", name, classifiers)
    parameters = inspect.signature(classifiers[name]).parameters
    given = dict(arguments)
    if "num_classes" not in parameters and "out_channels" in parameters:
        given.setdefault("out_channels", given.pop("num_classes", None))
    if "pretrained" in parameters:
        given["pretrained"] = False  # some of MONAI's networks download weights by default
    return partial(classifiers[name], **given)


LIBRARIES = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers, "monai": _monai}


# The names of Pillow's resampling filters, by number.
PILLOW_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


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
