"""The classification head of a network, and its classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from mergestream.runtime.errors import NetworkError, unknown_name

TORCHVISION_HEADS = ("fc", "heads", "head", "classifier")
MONAI_HEADS = ("class_layers", "fc", "_fc", "last_linear", "classification_head")


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
    elif library == "monai":
        names = _last_layer(module, MONAI_HEADS)
    else:
        names = _last_layer(module, TORCHVISION_HEADS)
        if library != "torchvision" and not _is_last(module, names):
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


def _last_layer(module: nn.Module, usual_names: tuple[str, ...]) -> tuple[str, ...]:
    """The last layer with a weight, inside the child with a usual name."""
    for usual in usual_names:
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
