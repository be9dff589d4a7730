"""The network that a foreign checkpoint belongs to, by name, with random weights."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mergestream.errors import InputError, NetworkError, unknown_name
from mergestream.networks import Architecture, Network, create_network, from_module

# Who wrote a Hugging Face configuration, and what the classes are called, is told elsewhere.
NOT_ARGUMENTS = (
    "architectures", "auto_map", "transformers_version", "model_type", "_name_or_path", "name_or_path", "torch_dtype",
    "dtype", "num_labels", "id2label", "label2id",
)  # fmt: skip
Values = Mapping[str, Any]


def build_network(name: str, classes: tuple[str, ...], config: Values, arguments: Values) -> Network:
    """By timm name, or 'torchvision:NAME', 'transformers:CLASS', 'monai:CLASS'; `config` lay with the weights."""
    library, _, rest = name.rpartition(":")
    if library == "transformers":
        return _transformers(rest, classes, config, arguments)
    if library == "monai":
        return _monai(rest, len(classes), arguments)
    recorded = config.get("architecture")
    if isinstance(recorded, str) and recorded != rest.split(".")[0]:
        raise InputError(f"config.json beside the weights says they are of '{recorded}', not '{rest}'.")
    own = config.get("model_args")
    return create_network(name, num_classes=len(classes), **{**(own if isinstance(own, dict) else {}), **arguments})


def _transformers(name: str, classes: tuple[str, ...], config: Values, arguments: Values) -> Network:
    labels = config.get("id2label")
    recorded = [str(label) for label in labels.values()] if isinstance(labels, dict) else []
    if sorted(recorded) == sorted(classes) and tuple(recorded) != classes:
        raise InputError(f"config.json has the classes in another order: {', '.join(recorded)}. Give them as they are.")
    own = {key: value for key, value in config.items() if key not in NOT_ARGUMENTS}
    named = {"id2label": dict(enumerate(classes)), "label2id": {label: i for i, label in enumerate(classes)}}
    # Described anew, so that it equals the card of the same network made in Python.
    return from_module(Architecture("transformers", name, {**own, **arguments, **named}).build().eval())


def _monai(name: str, count: int, arguments: Values) -> Network:
    try:
        from monai.networks import nets
    except ImportError:
        raise NetworkError("MONAI is not installed: pip install 'mergestream[monai]'.") from None
    factory: Any = getattr(nets, name, None)
    if not inspect.isclass(factory) and not inspect.isfunction(factory):
        raise unknown_name("MONAI network", name, [each for each in dir(nets) if not each.startswith("_")])
    described = Architecture("custom", f"monai.networks.nets.{name}", dict(arguments))
    takes = inspect.signature(factory).parameters
    counted = next((each for each in ("num_classes", "out_channels") if each in takes), "num_classes")
    # Some of MONAI's networks download weights unless they are told not to.
    quiet = {"pretrained": False} if "pretrained" in takes else {}
    try:
        module: Any = factory(**{counted: count, **arguments, **quiet})
    except (TypeError, ValueError, AssertionError, RuntimeError, NotImplementedError) as error:
        why = str(error).split("\n")[0]
        raise NetworkError(
            f"Cannot build monai:{name} with {arguments}: {why}. Give its arguments with --arg."
        ) from error
    return replace(from_module(module.eval()), architecture=described)
