"""Networks from names or modules, with their classification head, classes and preprocessing."""

import inspect
import json
import reprlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from mergestream.networks.allow_list import LIBRARIES, TRANSFORMERS, construct, require_arguments
from mergestream.networks.preprocessing import Preprocessing, find_preprocessing
from mergestream.runtime.errors import InputError, MergestreamError, NetworkError, unknown_name

# Attributes that do not change a network's function: of training, or the path of a checkpoint.
IGNORED = ("training", "momentum", "grad_checkpointing", "gradient_checkpointing", "name_or_path")


@dataclass(frozen=True)
class Architecture:
    """How to rebuild the network: a library, a name in it, JSON arguments. 'custom' cannot be rebuilt."""

    library: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.library}:{self.name}"

    def __post_init__(self) -> None:
        texts = isinstance(self.library, str) and isinstance(self.name, str)
        if not texts or not isinstance(self.arguments, dict) or not all(isinstance(k, str) for k in self.arguments):
            raise InputError(f"A network is a library, a name and named arguments, got {self!r:.300}.")
        if self.library in LIBRARIES:
            require_arguments(str(self), self.arguments)

    def build(self, most: int | None = None) -> nn.Module:
        """Build the network with random weights. most: how many numbers its weights hold, which bounds its size."""
        if self.library not in LIBRARIES:
            raise NetworkError(
                f"The network {self} cannot be built from its name: its arguments are not recorded. "
                f"Pass an instance: ExpertPool.load(folder, network=YourNetwork(...))."
            )
        try:
            return construct(LIBRARIES[self.library](self.name, self.arguments), str(self), most)
        except MergestreamError:
            raise
        except Exception as error:  # a library can fail in any way on arguments from elsewhere
            message, given = str(error).split("\n")[0][:300], reprlib.repr(self.arguments)
            hint = " Give its arguments with --arg, except the number of classes." if self.library == "monai" else ""
            raise InputError(f"Cannot build {self} with {given}: {message!r} (in {self.library}).{hint}") from error


@dataclass(frozen=True)
class Network:
    """A module, the names of its head, and its preprocessing (None if unknown)."""

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

    def require_preprocessing(self) -> Preprocessing:
        if self.preprocessing is None:
            raise NetworkError(
                f"How images are prepared for {self.architecture} is unknown: create or save it with preprocessing=."
            )
        return self.preprocessing


def create_network(name: str, *, num_classes: int, **arguments: Any) -> Network:
    """Build by timm name, or 'torchvision:NAME', 'monai:CLASS', 'transformers:CLASS' (arguments: its config's).

    Its weights are random; pretrained weights come from files, never from arguments.
    """
    library, _, rest = name.rpartition(":")
    counted = "num_labels" if library == "transformers" else "num_classes"
    architecture = Architecture(library or "timm", rest, {**arguments, counted: num_classes})
    return from_architecture(architecture)


def from_architecture(architecture: Architecture, most: int | None = None) -> Network:
    return from_module(architecture.build(most).eval(), architecture=architecture)


def from_module(
    module: nn.Module,
    head: str | Iterable[str] | None = None,
    preprocessing: Preprocessing | None = None,
    *,
    architecture: Architecture | None = None,
) -> Network:
    """Describe any nn.Module; what is not given is detected."""
    architecture = architecture or _describe(module)
    preprocessing = preprocessing or find_preprocessing(module, architecture.library, architecture.name)
    return Network(module, architecture, find_head(module, head), preprocessing)


def recover_architecture(module: nn.Module) -> Architecture:
    """The timm name that rebuilds exactly this module, if its recorded configuration suffices; otherwise 'custom'."""
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
    """The first setting in which two modules of one class differ, or None.

    Two ViTs with 2 and 4 attention heads have the same shapes but are different functions.
    """
    mine, theirs = _settings(one), _settings(other)
    for key in [*mine, *theirs]:
        if mine.get(key) != theirs.get(key):
            return f"{key} is {mine.get(key)!r} against {theirs.get(key)!r}"
    return None


def _settings(module: nn.Module) -> dict[str, Any]:
    """Plain attributes of all submodules, except those that matter in training only.

    The outermost module's own attributes are left out: they may be its author's bookkeeping (an epoch, a site).
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
    """Take the logits [B,C] from a network's output: a tensor, Hugging Face's output, or MONAI's tuple."""
    if isinstance(output, Tensor):
        return output
    logits = output[0] if isinstance(output, tuple | list) and output else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise NetworkError(f"The network returned {type(output).__name__}; expected logits [B,C] or '.logits'.")
    return logits


def _describe(module: nn.Module) -> Architecture:
    name = type(module).__name__
    if name in TRANSFORMERS and hasattr(module, "config"):
        try:
            return Architecture("transformers", name, _json_config(module))
        except InputError:
            pass  # a card of this network would be refused
    return Architecture("custom", f"{type(module).__module__}.{type(module).__qualname__}")


def _json_config(module: nn.Module) -> dict[str, Any]:
    config: Any = module.config
    if not hasattr(config, "to_json_string"):
        return {}
    values = json.loads(config.to_json_string(use_diff=True))
    # The author and the path of a config are not part of the architecture: two sites may differ in them.
    ignored = ("transformers_version", "architectures", "_name_or_path", "name_or_path", "torch_dtype", "dtype")
    return {key: value for key, value in values.items() if key not in ignored and "drop" not in key}


# Names of classifiers in torchvision and MONAI.
HEADS = ("class_layers", "fc", "_fc", "heads", "head", "classifier", "last_linear", "classification_head")


def find_head(module: nn.Module, head: str | Iterable[str] | None = None) -> tuple[str, ...]:
    """Names of the classifier modules: given, recorded by the library, or the last layer under a usual name."""
    if head is not None:
        return _given_head(module, (head,) if isinstance(head, str) else tuple(head))
    library = type(module).__module__.split(".")[0]
    if library == "timm" or hasattr(module, "pretrained_cfg"):
        names = _timm_head(module)
    elif type(module).__name__.endswith("ForImageClassification"):
        children = {name: child for name, child in module.named_children() if "classifier" in name or name == "head"}
        names = tuple(name for name, child in children.items() if any(True for _ in child.parameters()))
    else:
        names = _last_layer(module)
        if library not in ("torchvision", "monai") and not _is_last(module, names):
            names = ()
    if not names:
        linear = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
        raise NetworkError(
            f"Cannot tell which part of {type(module).__name__} is its classification head. Name it with head=; "
            f"its linear layers: {', '.join(linear[-5:]) or 'none'}."
        )
    return names


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


def _last_layer(module: nn.Module) -> tuple[str, ...]:
    """The last layer with a weight, inside the child with a usual name."""
    for usual in HEADS:
        child = getattr(module, usual, None)
        if isinstance(child, nn.Module):
            layers = [n for n, m in child.named_modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv3d)]
            if layers:
                return (f"{usual}.{layers[-1]}" if layers[-1] else usual,)
    return ()


def _is_last(module: nn.Module, head: tuple[str, ...]) -> bool:
    """Whether the module's last parameters are the head's: a hidden layer may have a usual name too."""
    last = [name for name, _ in module.named_parameters()][-1:]
    return bool(last) and last[0].startswith(tuple(f"{name}." for name in head))


def count_classes(module: nn.Module, head: tuple[str, ...]) -> int | None:
    """Number of classes: the width of the head's last layer; None if it has no linear layer or convolution."""
    layers = [layer for name in head[-1:] for layer in module.get_submodule(name).modules()]
    widths = [
        layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
        for layer in layers
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d)
    ]
    return widths[-1] if widths else None


def class_names(module: nn.Module) -> tuple[str, ...] | None:
    """Class names in a Hugging Face config, unless they are placeholders."""
    names: dict[int, str] = getattr(getattr(module, "config", None), "id2label", None) or {}
    listed = tuple(str(names[key]) for key in sorted(names))
    return None if all(name.startswith("LABEL_") for name in listed) else listed
