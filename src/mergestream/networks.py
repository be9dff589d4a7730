"""Names and modules -> a network with a known encoder/head split and preprocessing."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from mergestream.errors import InputError, MergestreamError, NetworkError, unknown_name

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TORCHVISION_HEADS = ("fc", "heads", "head", "classifier")
# Attributes that make no other function: of training, or of where a checkpoint lay.
IGNORED = ("training", "momentum", "grad_checkpointing", "gradient_checkpointing", "name_or_path")
MONAI_HEADS = ("class_layers", "fc", "_fc", "last_linear", "classification_head")


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

    def __post_init__(self) -> None:
        texts = isinstance(self.library, str) and isinstance(self.name, str)
        if not texts or not isinstance(self.arguments, dict) or not all(isinstance(k, str) for k in self.arguments):
            raise InputError(f"A network is a library, a name and named arguments, got {self!r}.")
        # A card comes from another site: building its network must read no file and ask no server.
        for key in self.arguments:
            if key in ("pretrained", "checkpoint_path", "cache_dir") or key.startswith(("pretrained_", "weights")):
                raise InputError(f"'{key}' is no argument of an architecture: weights come from safetensors only.")

    def build(self) -> nn.Module:
        if self.library not in BUILDERS:
            raise NetworkError(
                f"The network {self} cannot be built from its name: its arguments are not recorded. "
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
    """A network by timm name, or 'torchvision:NAME' or 'transformers:CLASS' (arguments: those of its config).

    Its weights are random; pretrained ones come from files, never from a network's arguments.
    """
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


def recover_architecture(module: nn.Module) -> Architecture:
    """The name that builds this very module again, where timm's own record of it suffices; else it stays custom."""
    described = _describe(module)
    name = (getattr(module, "pretrained_cfg", None) or {}).get("architecture")
    if described.library != "custom" or not name:
        return described
    candidate = Architecture("timm", name, {"num_classes": int(getattr(module, "num_classes", 0))})
    try:
        rebuilt = candidate.build()
    except MergestreamError:
        return described
    shapes = [{key: tensor.shape for key, tensor in each.state_dict().items()} for each in (module, rebuilt)]
    return candidate if shapes[0] == shapes[1] and first_difference(module, rebuilt) is None else described


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
    """Plain attributes of all submodules, less those that matter in training only.

    The outermost module's own attributes are its author's bookkeeping (an epoch, a site); Hugging Face has a config.
    """
    settings: dict[str, Any] = {"config": _json_config(module) if hasattr(module, "config") else None}
    for path, child in module.named_modules():
        if "drop" in path or "Drop" in type(child).__name__:
            continue
        settings[f"{path or 'network'} (type)"] = type(child).__name__
        for name, value in vars(child).items():
            if path and not name.startswith("_") and "drop" not in name and name not in IGNORED:
                if isinstance(value, bool | int | float | str | tuple):
                    settings[f"{path}.{name}"] = value
                elif inspect.isfunction(value) or inspect.isbuiltin(value):
                    settings[f"{path}.{name}"] = value.__qualname__
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
        children = {name: child for name, child in module.named_children() if "classifier" in name or name == "head"}
        found = tuple(name for name, child in children.items() if any(True for _ in child.parameters()))
    elif library == "monai":
        found = _last_layer(module, MONAI_HEADS)
    else:
        found = _last_layer(module, TORCHVISION_HEADS)
        if library != "torchvision" and not _is_last(module, found):
            found = ()
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


def _is_last(module: nn.Module, head: tuple[str, ...]) -> bool:
    """Whether the module's last parameters are the head's: a hidden layer or a stem may carry a usual name too."""
    last = [name for name, _ in module.named_parameters()][-1:]
    return bool(last) and last[0].startswith(tuple(f"{name}." for name in head))


def count_classes(module: nn.Module, head: tuple[str, ...]) -> int | None:
    """How many classes the head answers: the width of its last layer, None where it has no usual one."""
    layers = [layer for name in head[-1:] for layer in module.get_submodule(name).modules()]
    widths = [
        layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
        for layer in layers
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d)
    ]
    return widths[-1] if widths else None


def class_names(module: nn.Module) -> tuple[str, ...] | None:
    """The names a Hugging Face config gives its classes, unless they are its placeholders."""
    names: dict[int, str] = getattr(getattr(module, "config", None), "id2label", None) or {}
    listed = tuple(str(names[key]) for key in sorted(names))
    return None if all(name.startswith("LABEL_") for name in listed) else listed


# --- what it expects of pixels ----------------------------------------------------------------------------


def find_preprocessing(module: nn.Module, architecture: Architecture) -> Preprocessing | None:
    """Known per network for timm, torchvision and Hugging Face; None where it is not, and pixels must come prepared."""
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
    channels = _input_channels(module, default=config["input_size"][0])
    mean, std = (tuple(config[key]) for key in ("mean", "std"))
    if channels != len(mean):
        mean, std = (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
    return Preprocessing((size[0], size[1]), config["interpolation"], mean, std)


def _input_channels(module: nn.Module, default: int) -> int:
    first = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    # Networks that fold space into depth start with a convolution of many channels.
    return first.in_channels if first is not None and first.in_channels <= 4 else default


def _torchvision_preprocessing(module: nn.Module, architecture: Architecture) -> Preprocessing | None:
    """By name, that of its first published weights; of a bare module, only if all weights of its family agree."""
    from torchvision.models import WeightsEnum, get_model_weights

    if architecture.library == "torchvision":
        presets = [next(iter(get_model_weights(architecture.name))).transforms()]
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


# --- building by name -------------------------------------------------------------------------------------


def _describe(module: nn.Module) -> Architecture:
    if type(module).__name__.endswith("ForImageClassification") and hasattr(module, "config"):
        return Architecture("transformers", type(module).__name__, _json_config(module))
    return Architecture("custom", f"{type(module).__module__}.{type(module).__qualname__}")


def _json_config(module: nn.Module) -> dict[str, Any]:
    import json

    config: Any = module.config
    if not hasattr(config, "to_json_string"):
        return {}
    values = json.loads(config.to_json_string(use_diff=True))
    # Who wrote a config, and where it lay, is not part of the architecture: two sites may differ in it.
    foreign = ("transformers_version", "architectures", "_name_or_path", "name_or_path", "torch_dtype", "dtype")
    return {key: value for key, value in values.items() if key not in foreign and "drop" not in key}


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
