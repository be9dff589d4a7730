"""A stream's state as JSON, bit for bit: for its file and for the audit line."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.runtime.errors import CheckpointError
from mergestream.runtime.files import sha256_of_json
from mergestream.serving.engine.registry import State
from mergestream.serving.guards.stream_guards import Memory

MOST_NUMBERS = 4096  # of a state inside an audit line
SPELT_OUT = 256  # numbers of a tensor that are written as numbers


def state_to_json(state: State | None) -> dict[str, Any] | None:
    """Bit for bit: a 32-bit number is read back from its decimal digits as it was."""
    if state is None:
        return None
    about = {"pool_sha256": state.pool_sha256, "experts": list(state.experts)}
    return {**about, "method": _encoded(state.method), "guards": state.memory.to_json()}


def state_from_json(value: Mapping[str, Any] | None) -> State | None:
    if value is None:
        return None
    try:
        method, memory = _decoded(value["method"]), Memory.from_json(value["guards"])
        return State(value["pool_sha256"], tuple(value["experts"]), method, memory)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"This is not the state of a stream: {error!r}.") from error


def state_in_line(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """A state as an audit line holds it: whole, or its hash where it is too large."""
    if state is None or _numbers(state) <= MOST_NUMBERS:
        return state
    return {"sha256": sha256_of_json(state)}


def is_whole(state: Mapping[str, Any] | None) -> bool:
    return state is None or "method" in state


def _encoded(value: Any) -> Any:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        told = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if flat.numel() <= SPELT_OUT:
            return {**told, "values": flat.tolist()}
        return {**told, "base64": base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()}
    if isinstance(value, Mapping):
        return {str(key): _encoded(item) for key, item in value.items()}
    return [_encoded(item) for item in value] if isinstance(value, list | tuple) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, Mapping) and value.keys() >= {"dtype", "shape"}:
        dtype = getattr(torch, value["dtype"])
        if "values" in value:
            return torch.tensor(value["values"], dtype=dtype).reshape(value["shape"])
        raw = torch.from_numpy(np.frombuffer(base64.b64decode(value["base64"]), dtype=np.uint8).copy())
        return raw.view(dtype).reshape(value["shape"])
    if isinstance(value, Mapping):
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _numbers(value: Any) -> int:
    """How many numbers an encoded state holds."""
    if isinstance(value, Mapping):
        if value.keys() >= {"dtype", "shape"}:
            return int(np.prod(value["shape"], dtype=np.int64))
        return sum(map(_numbers, value.values()))
    return sum(map(_numbers, value)) if isinstance(value, list) else 1
