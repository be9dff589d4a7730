"""The device that a command runs on, and the type of numbers that is fast there."""

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


def resolve_dtype(dtype: str, device: str) -> str:
    """A type's name; 'auto' is bfloat16 on a GPU, and on a processor with instructions for it, else float32."""
    narrow = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    fast = "bfloat16" if narrow or resolve_device(device) == "cuda" else "float32"
    return fast if dtype == "auto" else dtype
