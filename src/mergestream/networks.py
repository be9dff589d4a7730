"""Names and modules -> a network with a known encoder/head split and preprocessing."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from mergestream.errors import InputError, NetworkError, unknown_name

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TORCHVISION_HEADS = ("fc", "heads", "head", "classifier")
TRAINING_ONLY = ("training", "momentum", "grad_checkpointing", "gradient_checkpointing")
MONAI_HEADS = ("class_layers", "fc", "_fc", "last_linear", "classification_head")


@dataclass(frozen=True)
class Preprocessing:
    """What a network expects of pixels: Resize((H,W)) without a crop, then mean and std per channel."""

    size: tuple[int, int]
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        if self.interpolation not in [mode.value for mode in InterpolationMode]:
            raise unknown_name("interpolation", self.interpolation, [mode.value for mode in InterpolationMode])
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise InputError(f"mean and std must be of one length and std above 0: {self.mean}, {self.std}.")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Preprocessing:
        height, width = value["size"]
        return cls((height, width), value["interpolation"], tuple(value["mean"]), tuple(value["std"]))

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 [B,c,h,w] of any size -> normalised fp32 [B,c,H,W]."""
        if tuple(images.shape[-2:]) != self.size:
            mode = InterpolationMode(self.interpolation)
            images = transforms.resize(images, list(self.size), interpolation=mode, antialias=True)
        pixels = images.to(torch.float32) / 255
        return transforms.normalize(pixels, list(self.mean), list(self.std))


@dataclass(frozen=True)
class Architecture:
    """How to build the network again: a library, a name in it, JSON arguments. 'custom' cannot be rebuilt by name."""

    library: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.library}:{self.name}"

    def build(self) -> nn.Module:
        if self.library not in BUILDERS:
            raise NetworkError(
                f"The network {self} is the author's own and cannot be built from its name. "
                f"Pass an instance: ExpertPool.load(folder, network=YourNetwork(...))."
            )
        return BUILDERS[self.library](self.name, self.arguments)


@dataclass(frozen=True)
class Network:
    """A module, where its head is, and what it expects of pixels (None where that is not known)."""

    module: nn.Module
    architecture: Architecture
    head: tuple[str, ...]
    preprocessing: Preprocessing | None

    def describe(self) -> dict[str, Any]:
        """The JSON form written into expert cards and compared between experts."""
        return {
            "network": asdict(self.architecture),
            "head": list(self.head),
            "preprocessing": asdict(self.preprocessing) if self.preprocessing else None,
        }


def create_network(name: str, *, num_classes: int, **arguments: Any) -> Network:
    """A network by timm name, or 'torchvision:NAME' or 'transformers:CLASS' (arguments: those of its config)."""
    library, _, rest = name.rpartition(":")
    counted = "num_labels" if library == "transformers" else "num_classes"
    architecture = Architecture(library or "timm", rest, {**arguments, counted: num_classes})
    return from_architecture(architecture)


def from_architecture(architecture: Architecture) -> Network:
    module = architecture.build()
    return Network(module.eval(), architecture, find_head(module), find_preprocessing(module, architecture))


def from_module(
    module: nn.Module, head: str | Iterable[str] | None = None, preprocessing: Preprocessing | None = None
) -> Network:
    """Any nn.Module; its head is found or given, its preprocessing found or given or unknown."""
    architecture = _describe(module)
    return Network(
        module, architecture, find_head(module, head), preprocessing or find_preprocessing(module, architecture)
    )


def first_difference(one: nn.Module, other: nn.Module) -> str | None:
    """Where two modules of one class are configured differently though their tensors may fit, or None.

    Two ViTs with 2 and 4 attention heads have the same shapes and are different functions.
    """
    mine, theirs = _settings(one), _settings(other)
    for key in [*mine, *theirs]:
        if mine.get(key) != theirs.get(key):
            return f"{key} is {mine.get(key)!r} against {theirs.get(key)!r}"
    return None


def _settings(module: nn.Module) -> dict[str, Any]:
    """Plain attributes of all submodules, less those that matter in training only."""
    settings: dict[str, Any] = {}
    for path, child in module.named_modules():
        if "drop" in path or "Drop" in type(child).__name__:
            continue
        settings[f"{path or 'network'} (type)"] = type(child).__name__
        for name, value in vars(child).items():
            in_training_only = "drop" in name or name in TRAINING_ONLY
            if isinstance(value, bool | int | float | str) and not name.startswith("_") and not in_training_only:
                settings[f"{path or 'network'}.{name}"] = value
    return settings


def logits_of(output: Any) -> Tensor:
    """The logits [B,C] in what a network returns: a tensor, Hugging Face's output, or MONAI's tuple."""
    if isinstance(output, Tensor):
        return output
    logits = output[0] if isinstance(output, tuple | list) and output else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise NetworkError(f"The network returned {type(output).__name__}; expected logits [B,C] or '.logits'.")
    return logits


# --- where the head is ------------------------------------------------------------------------------------


def find_head(module: nn.Module, head: str | Iterable[str] | None = None) -> tuple[str, ...]:
    """Names of the classifier modules: given, or known for the library, or a last Linear with a usual name."""
    if head is not None:
        return _given_head(module, (head,) if isinstance(head, str) else tuple(head))
    library = type(module).__module__.split(".")[0]
    if library == "timm" or hasattr(module, "pretrained_cfg"):
        found = _timm_head(module)
    elif type(module).__name__.endswith("ForImageClassification"):
        found = tuple(name for name, _ in module.named_children() if "classifier" in name or name == "head")
    elif library == "monai":
        found = _last_layer(module, MONAI_HEADS)
    else:
        found = _last_layer(module, TORCHVISION_HEADS)
    if not found:
        linear = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
        raise NetworkError(
            f"Cannot tell which part of {type(module).__name__} is its classification head. Name it with head=; "
            f"its linear layers: {', '.join(linear[-5:]) or 'none'}."
        )
    return found


def _given_head(module: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    modules = dict(module.named_modules())
    for name in names:
        if name not in modules or not name:
            raise unknown_name(f"module in {type(module).__name__}", name, [m for m in modules if m])
        if not any(True for _ in modules[name].parameters()):
            raise NetworkError(f"'{name}' of {type(module).__name__} has no parameters, so it is not its head.")
    return names


def _timm_head(module: nn.Module) -> tuple[str, ...]:
    configuration = getattr(module, "pretrained_cfg", None) or {}
    named = configuration.get("classifier")
    names = (named,) if isinstance(named, str) else tuple(named or ())
    modules = dict(module.named_modules())
    present = tuple(name for name in names if name in modules)
    if present:
        return present
    find: Any = getattr(module, "get_classifier", lambda: None)
    classifier = find()
    return tuple(name for name, child in modules.items() if child is classifier)


def _last_layer(module: nn.Module, usual_names: tuple[str, ...]) -> tuple[str, ...]:
    """The last layer with a weight inside the child that carries a usual name."""
    for usual in usual_names:
        child = getattr(module, usual, None)
        if isinstance(child, nn.Module):
            layers = [n for n, m in child.named_modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv3d)]
            if layers:
                return (f"{usual}.{layers[-1]}" if layers[-1] else usual,)
    return ()


# --- what it expects of pixels ----------------------------------------------------------------------------


def find_preprocessing(module: nn.Module, architecture: Architecture) -> Preprocessing | None:
    """Known per network for timm, torchvision and Hugging Face; None for others, whose pixels must come prepared."""
    if hasattr(module, "pretrained_cfg"):
        return _timm_preprocessing(module)
    if architecture.library == "transformers":
        return _transformers_preprocessing(module)
    if type(module).__module__.startswith("torchvision."):
        return _torchvision_preprocessing(module, architecture)
    return None


def _timm_preprocessing(module: nn.Module) -> Preprocessing:
    from timm.data import resolve_model_data_config

    config = resolve_model_data_config(module)
    size = getattr(getattr(module, "patch_embed", None), "img_size", None) or config["input_size"][1:]
    channels = _input_channels(module, default=len(config["mean"]))
    mean, std = (tuple(config[key]) for key in ("mean", "std"))
    if channels != len(mean):
        mean, std = (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
    return Preprocessing((size[0], size[1]), config["interpolation"], mean, std)


def _input_channels(module: nn.Module, default: int) -> int:
    first = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    return first.in_channels if first is not None else default


def _torchvision_preprocessing(module: nn.Module, architecture: Architecture) -> Preprocessing:
    if architecture.library == "torchvision":
        from torchvision.models import get_model_weights

        preset = next(iter(get_model_weights(architecture.name))).transforms()
        size, mode = int(preset.crop_size[0]), preset.interpolation.value
        size = int(getattr(module, "image_size", size))
        return Preprocessing((size, size), mode, tuple(preset.mean), tuple(preset.std))
    size = int(getattr(module, "image_size", 224))
    return Preprocessing((size, size))


def _transformers_preprocessing(module: nn.Module) -> Preprocessing | None:
    """The defaults of the image processor that Hugging Face pairs with this network, at the network's own size."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

    config: Any = module.config
    if type(config) not in IMAGE_PROCESSOR_MAPPING:
        return None
    known = IMAGE_PROCESSOR_MAPPING[type(config)]
    classes = known.values() if isinstance(known, dict) else known if isinstance(known, tuple) else (known,)
    processor = next(c for c in classes if c is not None)()
    size = getattr(config, "image_size", None) or processor.size.get("height") or processor.size.get("shortest_edge")
    height, width = size if isinstance(size, list | tuple) else (size, size)
    mode = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")[int(processor.resample)]
    return Preprocessing((height, width), mode, tuple(processor.image_mean), tuple(processor.image_std))


# --- building by name -------------------------------------------------------------------------------------


def _describe(module: nn.Module) -> Architecture:
    if type(module).__name__.endswith("ForImageClassification") and hasattr(module, "config"):
        return Architecture("transformers", type(module).__name__, _json_config(module))
    return Architecture("custom", f"{type(module).__module__}.{type(module).__qualname__}")


def _json_config(module: nn.Module) -> dict[str, Any]:
    import json

    config: Any = module.config
    values = json.loads(config.to_json_string(use_diff=True))
    # The version that wrote a config is not part of the architecture: two sites may differ in it.
    return {key: value for key, value in values.items() if key not in ("transformers_version", "architectures")}


def _build_timm(name: str, arguments: dict[str, Any]) -> nn.Module:
    import timm

    if not timm.is_model(name.split(".")[0]):
        raise unknown_name("timm network", name, timm.list_models())
    return _construct(timm.create_model, f"timm:{name}", {"model_name": name, "pretrained": False, **arguments})


def _build_torchvision(name: str, arguments: dict[str, Any]) -> nn.Module:
    from torchvision import models

    if name not in models.list_models():
        raise unknown_name("torchvision network", name, models.list_models())
    return _construct(models.get_model, f"torchvision:{name}", {"name": name, "weights": None, **arguments})


def _build_transformers(name: str, arguments: dict[str, Any]) -> nn.Module:
    import transformers

    known = [n for n in dir(transformers) if n.endswith("ForImageClassification")]
    if name not in known:
        raise unknown_name("transformers network", name, known)
    network = getattr(transformers, name)
    return network(_construct(network.config_class, f"transformers:{name}", arguments))


def _construct(factory: Any, title: str, arguments: dict[str, Any]) -> Any:
    try:
        return factory(**arguments)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        where = getattr(inspect.getmodule(factory), "__name__", "")
        raise NetworkError(f"Cannot build {title} with {arguments}: {error} (in {where}).") from error


BUILDERS = {"timm": _build_timm, "torchvision": _build_torchvision, "transformers": _build_transformers}
