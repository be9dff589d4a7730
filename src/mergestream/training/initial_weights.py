"""Initial weights of an encoder: random, timm's published ones, or a local safetensors file."""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mergestream.networks.architecture import Network, create_network
from mergestream.runtime.errors import CheckpointError, NetworkError
from mergestream.training.head_start import head_state

RANDOM, PRETRAINED = "random", "pretrained"


def encoder_weights(network: str, arguments: dict[str, Any], init: str) -> dict[str, Tensor] | None:
    """Return the encoder's weights by name, or None for random ones."""
    if init == RANDOM:
        return None
    target = create_network(network, num_classes=2, **arguments)
    state = _load_published(network, arguments) if init == PRETRAINED else _read(Path(init))
    return _encoder_part(target, state, init)


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"):
        raise CheckpointError(f"{path} may be a pickle and is not opened. Convert it: mergestream pool import.")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"Cannot read the weights in {path}: {error}. Give a safetensors file.") from error


def _load_published(network: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    import timm

    try:
        return timm.create_model(network, pretrained=True, **arguments).state_dict()
    except Exception as error:  # a hub may fail in any way
        raise NetworkError(
            f"Cannot get timm's weights of '{network}': {error}. Without access to a hub, give a local file: "
            f"--init FILE, or --init random."
        ) from error


def _encoder_part(network: Network, state: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Select the encoder's weights and check names and shapes; timm resamples position embeddings."""
    adapt = getattr(sys.modules[type(network.module).__module__], "checkpoint_filter_fn", None)
    state = adapt(state, network.module) if adapt is not None else state
    heads, own = set(head_state(network)), network.module.state_dict()
    encoder = {name: tensor.to(own[name].dtype) for name, tensor in state.items() if name in own and name not in heads}
    missing = [name for name in own if name not in encoder and name not in heads]
    wrong = [name for name, tensor in encoder.items() if tensor.shape != own[name].shape]
    bad = [name for name, tensor in encoder.items() if tensor.is_floating_point() and not torch.isfinite(tensor).all()]
    for what, names in (("lack", missing), ("have another shape for", wrong), ("are not finite in", bad)):
        if names:
            raise NetworkError(f"The weights of {source} {what} {', '.join(names[:3])} of this network's encoder.")
    return encoder
