"""A state's plain form as JSON, bit for bit: for a stream's file and for the audit line."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.runtime.files import sha256_of_json

MOST_NUMBERS = 4096  # of a state inside an audit line
SPELT_OUT = 256  # numbers of a tensor that are written as numbers


def in_line(state: dict[str, Any]) -> dict[str, Any]:
    """A state as an audit line holds it: whole, or its hash where it is too large."""
    return state if _numbers(state) <= MOST_NUMBERS else {"sha256": sha256_of_json(state)}


def is_whole(state: Mapping[str, Any] | None) -> bool:
    return state is None or "method" in state


def encoded(value: Any) -> Any:
    """Nested tensors, numbers and text as JSON."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        about = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if flat.numel() <= SPELT_OUT:
            return {**about, "values": flat.tolist()}
        return {**about, "base64": base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()}
    if isinstance(value, Mapping):
        return {str(key): encoded(item) for key, item in value.items()}
    return [encoded(item) for item in value] if isinstance(value, list | tuple) else value


def decoded(value: Any) -> Any:
    """What `encoded` was given."""
    if isinstance(value, Mapping) and value.keys() >= {"dtype", "shape"}:
        dtype = getattr(torch, value["dtype"])
        if "values" in value:
            return torch.tensor(value["values"], dtype=dtype).reshape(value["shape"])
        raw = torch.from_numpy(np.frombuffer(base64.b64decode(value["base64"]), dtype=np.uint8).copy())
        return raw.view(dtype).reshape(value["shape"])
    if isinstance(value, Mapping):
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value


def _numbers(value: Any) -> int:
    """How many numbers an encoded state holds."""
    if isinstance(value, Mapping):
        if value.keys() >= {"dtype", "shape"}:
            return int(np.prod(value["shape"], dtype=np.int64))
        return sum(map(_numbers, value.values()))
    return sum(map(_numbers, value)) if isinstance(value, list) else 1
