"""The device that a command runs on."""

import torch

from mergestream.runtime.errors import InputError


def resolve_device(device: str) -> str:
    """'cpu' or 'cuda'; 'auto' is a CUDA device where there is one."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device is auto, cpu or cuda, got '{device}'.")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InputError("There is no CUDA device here: --device cpu, or auto.")
    return "cuda" if available and device != "cpu" else "cpu"
