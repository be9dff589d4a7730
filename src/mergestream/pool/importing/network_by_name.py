"""The network of a foreign checkpoint, built by name with random weights."""

from collections.abc import Mapping
from typing import Any

from mergestream.networks.architecture import Architecture, Network, create_network, from_module
from mergestream.runtime.errors import InputError

# Entries of a Hugging Face configuration that are not arguments of the network.
NOT_ARGUMENTS = (
    "architectures", "auto_map", "transformers_version", "model_type", "_name_or_path", "name_or_path", "torch_dtype",
    "dtype", "num_labels", "id2label", "label2id",
)  # fmt: skip
Values = Mapping[str, Any]


def network_by_name(name: str, classes: tuple[str, ...], config: Values, arguments: Values) -> Network:
    """Build by timm name, 'torchvision:NAME', 'transformers:CLASS' or 'monai:CLASS'; `config` lies by the weights."""
    library, _, rest = name.rpartition(":")
    if library == "transformers":
        return _transformers(rest, classes, config, arguments)
    recorded = config.get("architecture")
    if isinstance(recorded, str) and recorded != rest.split(".")[0]:
        raise InputError(f"config.json beside the weights says they are of '{recorded}', not '{rest}'.")
    own = config.get("model_args")
    return create_network(name, num_classes=len(classes), **{**(own if isinstance(own, dict) else {}), **arguments})


def _transformers(name: str, classes: tuple[str, ...], config: Values, arguments: Values) -> Network:
    labels = config.get("id2label")
    recorded = [str(label) for label in labels.values()] if isinstance(labels, dict) else []
    if sorted(recorded) == sorted(classes) and tuple(recorded) != classes:
        raise InputError(f"config.json has the classes in another order: {', '.join(recorded)}. Use that order.")
    own = {key: value for key, value in config.items() if key not in NOT_ARGUMENTS}
    named = {"id2label": dict(enumerate(classes)), "label2id": {label: i for i, label in enumerate(classes)}}
    # Described from the module, so that its card equals that of the same network built in Python.
    return from_module(Architecture("transformers", name, {**own, **arguments, **named}).build().eval())
