"""The state of a stream: carried from batch to batch, to other experts, and over a restart; as JSON, bit for bit."""

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.methods import State
from mergestream.methods.state import for_experts, to_plain
from mergestream.runtime.errors import CheckpointError, MergestreamError
from mergestream.runtime.files import sha256_of_json
from mergestream.runtime.json_record import parsed
from mergestream.serving.engine.lineup import Lineup
from mergestream.serving.guards.stream_guards import Memory

MOST_NUMBERS = 4096  # of a state inside an audit line
SPELT_OUT = 256  # numbers of a tensor that are written as numbers
OTHER_POOL = "the pool was loaded again, and its experts are others."
OTHER_METHOD = "the service was started with another method or other options."
OTHER_EXPERTS = "an expert was switched on or off, and this method learns from all of them together."


@dataclass(frozen=True)
class StreamState:
    """The method's state on these experts, and the guard rails' memory."""

    pool_sha256: str
    provenance: str | None  # hash of all that the answers depend on; None in a state of an earlier version
    experts: tuple[str, ...]
    method: State | None  # None at the start of a stream
    memory: Memory

    @cached_property
    def json(self) -> dict[str, Any]:
        """Bit for bit: a 32-bit number is read back from its decimal digits as it was."""
        about = {"pool_sha256": self.pool_sha256, "experts": list(self.experts)}
        about |= {} if self.provenance is None else {"provenance": self.provenance}
        method = {} if self.method is None else encoded(to_plain(self.method))
        return {**about, "method": method, "guards": asdict(self.memory)}

    @cached_property
    def in_line(self) -> dict[str, Any]:
        """The state as an audit line holds it: whole, or its hash where it is too large."""
        return self.json if _numbers(self.json) <= MOST_NUMBERS else {"sha256": sha256_of_json(self.json)}

    @classmethod
    def start(cls, lineup: Lineup) -> "StreamState":
        identity = lineup.identity
        return cls(identity["pool_sha256"], identity["provenance"], lineup.active.names, None, Memory())

    @classmethod
    def from_json(cls, value: Mapping[str, Any], lineup: Lineup) -> "StreamState":
        """Read a state on the line-up's pool, of whichever experts it is."""
        try:
            plain, experts = decoded(value["method"]), tuple(value["experts"])
            method = lineup.of(experts).active_method.read_state(plain) if plain else None
            return cls(value["pool_sha256"], value.get("provenance"), experts, method, parsed(Memory, value["guards"]))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"This is not the state of a stream: {error!r}.") from error

    def on(self, lineup: Lineup) -> "tuple[StreamState, str | None]":
        """The state to go on from with the experts in use, and the reason if the stream starts anew."""
        start, experts = StreamState.start(lineup), lineup.active.names
        if not belongs_to({"pool_sha256": self.pool_sha256, "provenance": self.provenance}, lineup):
            return start, OTHER_POOL
        if self.experts == experts:
            return self, None
        if self.method is None:
            return start, None
        method = for_experts(self.method, self.experts, lineup.active_method.start(), experts)
        if method is None:
            return start, OTHER_EXPERTS
        return replace(start, provenance=self.provenance, method=method), None


def belongs_to(state: Mapping[str, Any], lineup: Lineup) -> bool:
    """Whether answers still depend on the weights, cards, options and code that a state, as JSON, was computed with."""
    identity = lineup.identity
    provenance = state.get("provenance") or identity["provenance"]
    return (state["pool_sha256"], provenance) == (identity["pool_sha256"], identity["provenance"])


def restored(saved: Mapping[str, Any], lineup: Lineup) -> tuple[StreamState | None, str | None]:
    """The state that an earlier process saved, or the reason why the stream starts anew."""
    state = saved.get("state")
    if saved.get("lost") or state is None:
        return None, saved.get("lost")
    if (saved["method"], saved["options"]) != (lineup.method, lineup.options):
        return None, OTHER_METHOD
    try:
        return (StreamState.from_json(state, lineup), None) if belongs_to(state, lineup) else (None, OTHER_POOL)
    except (KeyError, TypeError):
        return None, "its saved state cannot be read."
    except MergestreamError as error:
        return None, str(error)


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
