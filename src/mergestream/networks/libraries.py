"""Networks of timm, torchvision, Hugging Face and MONAI: built by name, and the preprocessing recorded for them."""

import inspect
import sys
from collections.abc import Container
from typing import Any, get_type_hints

from torch import nn

from mergestream.networks.preprocessing import Preprocessing
from mergestream.runtime.errors import NetworkError, unknown_name

# MONAI's modules with classifiers. Others may download weights when built (Transchex), or pass their arguments on to
# other libraries (TorchVisionFCModel): a card must reach neither.
MONAI_FAMILIES = tuple(f"monai.networks.nets.{file}" for file in ("densenet", "efficientnet", "resnet", "senet", "vit"))
# What a library may raise for wrong arguments.
UNFIT = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


def _build_timm(name: str, arguments: dict[str, Any]) -> nn.Module:
    import timm

    if not timm.is_model(name.split(".")[0]):
        raise unknown_name("timm network", name, timm.list_models())
    return _construct(timm.create_model, f"timm:{name}", {**arguments, "model_name": name, "pretrained": False})


def _build_torchvision(name: str, arguments: dict[str, Any]) -> nn.Module:
    from torchvision import models

    classifiers = models.list_models(module=models)
    if name not in classifiers:
        raise unknown_name("torchvision network", name, classifiers)
    return _construct(models.get_model, f"torchvision:{name}", {**arguments, "name": name, "weights": None})


def _build_transformers(name: str, arguments: dict[str, Any]) -> nn.Module:
    import transformers

    names = [n for n in dir(transformers) if n.endswith("ForImageClassification")]
    if name not in names:
        raise unknown_name("transformers network", name, names)
    network = getattr(transformers, name)
    return network(_construct(network.config_class, f"transformers:{name}", arguments))


def _build_monai(name: str, arguments: dict[str, Any]) -> nn.Module:
    classifiers = _monai_classifiers()
    if name not in classifiers:
        raise unknown_name("MONAI classifier", name, classifiers)
    parameters = inspect.signature(classifiers[name]).parameters
    # Some of MONAI's networks download weights by default.
    offline = {"pretrained": False} if "pretrained" in parameters else {}
    given = {**_with_class_count(arguments, parameters), **offline}
    hint = "Give its arguments with --arg, except the number of classes."
    return _construct(classifiers[name], f"monai:{name}", given, hint)


def _monai_classifiers() -> dict[str, Any]:
    """Classes and functions by name: the only ones that a card may name."""
    try:
        from monai.networks import nets
    except ImportError:
        raise NetworkError("MONAI is not installed: pip install 'mergestream[monai]'.") from None
    return {name: value for name, value in vars(nets).items() if _is_monai_classifier(value)}


def _is_monai_classifier(candidate: Any) -> bool:
    if getattr(candidate, "__module__", None) not in MONAI_FAMILIES:
        return False
    result = get_type_hints(candidate).get("return") if inspect.isfunction(candidate) else candidate
    return inspect.isclass(result) and issubclass(result, nn.Module)


def _with_class_count(arguments: dict[str, Any], parameters: Container[str]) -> dict[str, Any]:
    """Rename num_classes of a card to out_channels, where a MONAI network calls it so."""
    if "num_classes" in parameters or "out_channels" not in parameters or "out_channels" in arguments:
        return arguments
    return {"out_channels" if key == "num_classes" else key: value for key, value in arguments.items()}


def _construct(factory: Any, title: str, arguments: dict[str, Any], hint: str = "") -> Any:
    try:
        return factory(**arguments)
    except UNFIT as error:
        where = getattr(inspect.getmodule(factory), "__name__", "")
        message = str(error).split("\n")[0]
        raise NetworkError(f"Cannot build {title} with {arguments}: {message} (in {where}). {hint}".rstrip()) from error


BUILDERS = {
    "timm": _build_timm,
    "torchvision": _build_torchvision,
    "transformers": _build_transformers,
    "monai": _build_monai,
}


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
