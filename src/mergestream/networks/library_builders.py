"""Networks built by name with the libraries that define them. Weights are random; nothing is downloaded."""

import inspect
from collections.abc import Container
from typing import Any, get_type_hints

from torch import nn

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
